"""The title of each figure, and a sentence that says how to read it."""

# Title, and how to read it, by the name of the figure.
CAPTIONS = {
    "glance": (
        "Time, memory and verdict of each run",
        "Time and memory are over the baseline's, so smaller is better; colour and sign are the verdict's.",
    ),
    "loss": (
        "Loss",
        "Curves that lie on each other computed the same loss; the panel below shows on a log axis how far each is "
        "from the baseline's. Of more than 20 runs each has a panel.",
    ),
    "step_time": (
        "Step time",
        "A shorter bar is a faster step; the ratio is its time over the time of the baseline, with the interval that "
        "holds it in 95 of 100 cases.",
    ),
    "phases": (
        "Phases of a step",
        "Each piece of a bar is the time of one phase, so two runs differ where their pieces differ in length.",
    ),
    "memory": (
        "Memory",
        "The coloured bar is what must be live by the memory model, the grey bar what was measured; the two should be "
        "of one length.",
    ),
    "training": (
        "Training steps",
        "Each panel is one quantity by step: rate, loss scale, norm of the gradients, and shares that 16 bits lose.",
    ),
    "gradient_error": (
        "Errors of the gradients",
        "Each bar, or dot where a network has many tensors, is the distance of a gradient from the exact one; what "
        "is beyond its black mark, or right of the line of the limit, breaks its limit.",
    ),
    "noise": (
        "Loss beside the noise",
        "The grey band is how far correct runs lie from each other; a line that stays below the dashed limit cannot "
        "be told from the reference.",
    ),
    "exponents": (
        "Exponents",
        "Each curve is the share of a tensor's values by power of two; what lies left of a limit underflows in fp16, "
        "what lies right of it overflows.",
    ),
    "update_ratio": (
        "Updates beside their weights",
        "Updates left of a dashed line are too small for that format, and are lost if the weights are stored in it.",
    ),
    "dtypes": (
        "Precision of each layer",
        "A row is a layer and a cell the dtype that was observed there; pale cells are as in the baseline.",
    ),
    "digits": (
        "Where the network loses its digits",
        "A row is a layer, or the work before one; a mark right of the dashed line has lost more than half of the "
        "digits of the precision, and the text beside it says why.",
    ),
}
