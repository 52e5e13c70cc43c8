"""The dtypes in which each layer of a compiled step runs, read from the graphs that inductor is given.

Hooks do not work inside of a graph. Each of its nodes knows the dtype of its value and the modules that it comes from;
a node of backward knows its modules by the forward node that it differentiates. Inductor starts from the two graphs,
casts and decompositions included. The kernels that inductor makes are not seen: pointwise operations that it fuses
stay in fp32 in between (torch._inductor.config.emulate_precision_casts), where the graph rounds.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx
from torch.fx import Graph, GraphModule, Node

from mpcompare.backends.layer_dtypes.table import LOSS, LayerDtypes, arithmetic
from mpcompare.contract import ModuleDtypes


def layer_dtypes_of_compiled_step(
    model: nn.Module, masters: Mapping[str, Tensor], step: Callable[..., Tensor], options: dict[str, Any]
) -> ModuleDtypes:
    """Compiles ``step`` and returns the dtypes in the graphs of its forward and backward: the table of
    :meth:`mpcompare.contract.Backend.module_dtypes`. The graphs are run as they are.

    ``step(model)`` returns the loss. It is compiled under its own name, so that the timed step never finds the code
    that is compiled here. ``model`` and ``masters`` are as in :meth:`LayerDtypes.table`, ``options`` are inductor's.
    """
    graphs: list[Graph] = []
    held = {id(t) for t in (*model.parameters(), *model.buffers())}
    state: set[str] = set()  # the names of the placeholders that stand for parameters and buffers

    def keep(graph: GraphModule, _: Sequence[Any], **__: Any) -> Any:
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    def compiler(graph: GraphModule, inputs: Sequence[Any]) -> Any:
        state.update(f"primals_{place}" for place, given in enumerate(inputs, start=1) if id(given) in held)
        return compile_fx(graph, list(inputs), inner_compile=keep, config_patches=options)

    loss = torch.compile(step, fullgraph=True, dynamic=False, backend=compiler)(model)
    loss.backward()
    forward, backward = graphs
    dtypes, modules = LayerDtypes(), {str(id(module)): name for name, module in model.named_modules()}
    _read_forward([node for node in forward.nodes if not _is_backward(node)], modules, state, dtypes)
    # The forward graph also holds what backward needs and can be computed early.
    _read_backward([node for node in [*backward.nodes, *forward.nodes] if _is_backward(node)], modules, dtypes)
    dtypes.add(LOSS, "output", [loss.dtype])
    return dtypes.table(model, masters)


def _is_backward(node: Node) -> bool:
    return "fwd_nn_module_stack" in node.meta or node.meta.get("partitioner_tag") == "is_backward"


def _stack(node: Node, modules: Mapping[str, str]) -> list[str]:
    """Returns the modules that a node comes from, the outermost first; ``[LOSS]`` where it comes from none."""
    stack = node.meta.get("fwd_nn_module_stack" if _is_backward(node) else "nn_module_stack") or {}
    known = (modules.get(key.partition("@")[0]) for key in stack)  # module@1: its second call
    return [name for name in known if name is not None] or [LOSS]


def _dtypes(nodes: Iterable[Node]) -> set[torch.dtype]:
    """Returns the dtypes of the tensors among the values of ``nodes``, without scalars."""
    values = [node.meta.get("val") for node in nodes]
    return {value.dtype for value in values if isinstance(value, Tensor) and value.dim()}


def _read_forward(nodes: Sequence[Node], modules: Mapping[str, str], state: set[str], dtypes: LayerDtypes) -> None:
    """Adds the dtypes of forward. A module's inputs come from nodes outside of it that hold no state; its outputs go to
    nodes outside of it."""
    # A copy_ writes a buffer of the module, and is part of no layer's arithmetic.
    called = [n for n in nodes if n.op == "call_function" and n.target is not torch.ops.aten.copy_.default]
    stacks = {node: _stack(node, modules) for node in called}
    for node, stack in stacks.items():
        for name in stack:
            given = [n for n in node.all_input_nodes if n.name not in state and name not in stacks.get(n, ())]
            if name != LOSS or any(n in stacks for n in given):  # the loss's targets are no input
                dtypes.add(name, "input", _dtypes(given))
            if any(name not in stacks.get(user, [name]) for user in node.users):
                dtypes.add(name, "output", _dtypes([node]))
        dtypes.add(stack[-1], "computes", arithmetic(node.target, _dtypes(node.all_input_nodes)))


def _read_backward(nodes: Sequence[Node], modules: Mapping[str, str], dtypes: LayerDtypes) -> None:
    """Adds the dtypes of backward. The gradient of a module's output comes from backward nodes that are not its own.
    Behind the loss, a node that comes from no module adds the gradients from several users of a tensor: it counts to
    the modules that all these users come from. Constants are shared and come from no module."""
    stacks: dict[Node, list[str]] = {}
    in_loss = True
    for node in nodes:
        if node.op != "call_function":
            continue
        stack = stacks[node] = _stack(node, modules)
        in_loss = in_loss and stack == [LOSS]
        if stack == [LOSS] and not in_loss:
            users = [set(stacks[n]) for n in node.all_input_nodes if n in stacks]
            stacks[node] = sorted(set.intersection(*users)) if users else [LOSS]
            continue
        for name in stack:
            given = [n for n in node.all_input_nodes if n.all_input_nodes and name not in stacks.get(n, [name])]
            dtypes.add(name, "gradient", (dtype for dtype in _dtypes(given) if dtype.is_floating_point))
        dtypes.add(stack[-1], "backward", arithmetic(node.target, _dtypes(node.all_input_nodes)))
