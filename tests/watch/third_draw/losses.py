"""Losses that overflow, that divide by 0, or that are something else than was meant."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from watch.second_draw.networks import GPT, MLP, ConvNet, UNet, images, rows, tokens
from watch.second_draw.registry import DEFECT, FACT, Training, bf16, fp16, scaler_of
from watch.third_draw.registry import bug


def supervised_contrast(z: Tensor, y: Tensor, guard: bool) -> Tensor:
    """Returns the contrast of each row with the rows of its label."""
    logits = z @ z.t() / 0.1
    logits = logits - logits.max(1, keepdim=True).values.detach()
    others = 1 - torch.eye(len(z))
    positive = (y[:, None] == y[None]).float() * others
    log_prob = logits - (logits.exp() * others).sum(1, keepdim=True).log()
    count = positive.sum(1)
    if guard:
        count = torch.where(count < 1e-6, 1.0, count)
    return -((positive * log_prob).sum(1) / count).mean()


@bug(
    "HobbitLong/SupContrast#142",
    "the mean over a row's positives is 0/0 where a label is there only once",
    fair="inf or NaN, loss",
    kind=DEFECT,
    precision="bf16",
)
def no_positives(wrong: bool) -> Training:
    model = MLP(20, 64, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(updates: int) -> None:
        for _ in range(updates):
            x, y = torch.randn(16, 20), torch.randint(12, (16,))
            with bf16():
                out = model(x)
            optimizer.zero_grad()
            supervised_contrast(F.normalize(out.float(), dim=1), y, guard=not wrong).backward()
            optimizer.step()

    return Training(model, optimizer, train)


class Retriever(nn.Module):
    """An encoder of questions and answers, with a temperature that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.temperature = MLP(20, 64, 16), nn.Parameter(torch.tensor(0.2))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = F.normalize(self.encoder(x).float(), dim=-1)
        return output


@bug(
    "NVIDIA-NeMo/Automodel#3850",
    "padded negatives are masked by -inf before they are divided by the learned temperature, whose gradient is NaN",
    fair="inf or NaN, loss, gradients",
    kind=DEFECT,
    precision="bf16",
)
def masks_before_temperature(wrong: bool) -> Training:
    model = Retriever()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    padding = torch.arange(4)[None] >= torch.tensor([4, 3, 2, 4, 1, 3, 4, 2])[:, None]

    def train(updates: int) -> None:
        for _ in range(updates):
            question, answer, negative = torch.randn(8, 20), torch.randn(8, 20), torch.randn(8, 4, 20)
            with bf16():
                q, a, n = model(question), model(answer), model(negative)
            own, hard = q @ a.t(), (q[:, None] * n).sum(-1)
            if wrong:
                logits = torch.cat([own, hard.masked_fill(padding, -torch.inf)], 1) / model.temperature
            else:
                logits = torch.cat(
                    [own / model.temperature, (hard / model.temperature).masked_fill(padding, -torch.inf)], 1
                )
            optimizer.zero_grad()
            F.cross_entropy(logits, torch.arange(8)).backward()
            optimizer.step()

    return Training(model, optimizer, train)


def dice(probability: Tensor, target: Tensor) -> Tensor:
    """Returns the Dice loss over the whole batch."""
    intersection = (probability * target).sum()
    cardinality = (probability + target).sum()
    return 1 - 2 * intersection / cardinality.clamp(min=1e-3)


@bug(
    "qubvel-org/segmentation_models.pytorch#463",
    "the sums of a Dice loss overflow in fp16: inf/inf is NaN",
    fair="overflow, inf or NaN, loss, skip",
    kind=DEFECT,
    precision="fp16",
    steps=2,
)
def dice_overflows(wrong: bool) -> Training:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.SiLU(), nn.Conv2d(4, 1, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = scaler_of(256.0)

    def train(updates: int) -> None:
        for _ in range(updates):
            x = torch.randn(4, 3, 256, 256)
            target = (x.mean(1, keepdim=True) > -0.2).half()
            with fp16():
                out = model(x)
            probability = torch.sigmoid(out)
            loss = dice(probability, target) if wrong else dice(probability.float(), target.float())
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return Training(model, optimizer, train)


@bug(
    "ultralytics/ultralytics#25097",
    "the mean of a cross-entropy is NaN in a batch whose pixels are all to be ignored",
    fair="inf or NaN, loss",
    kind=DEFECT,
    precision="bf16",
)
def all_ignored(wrong: bool) -> Training:
    model = UNet()
    model.out = nn.Conv2d(8, 4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(updates: int) -> None:
        for i in range(updates):
            x, _ = images()
            y = torch.full((8, 16, 16), 255) if i % 3 == 1 else torch.randint(4, (8, 16, 16))
            with bf16():
                out = model(x).float()
            if not wrong and bool((y == 255).all()):
                loss = out.flatten()[0] * 0
            else:
                loss = F.cross_entropy(out, y, ignore_index=255)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return Training(model, optimizer, train)


@bug(
    "MakazhanAlpamys/Soup#719",
    "the student's probabilities are the target of kl_div: those that underflow to 0 have a gradient of NaN",
    fair="inf or NaN, underflow, loss",
    kind=DEFECT,
    precision="bf16",
)
def reverse_divergence(wrong: bool) -> Training:
    model, teacher = GPT(), GPT().requires_grad_(False).eval()
    for each in (model, teacher):
        each.head.weight.data *= 50  # as sure as a trained network
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(updates: int) -> None:
        for _ in range(updates):
            x, _ = tokens()
            with bf16():
                out = model(x)
                with torch.no_grad():
                    expected = teacher(x)
            student = F.log_softmax(out.float().flatten(0, 1) / 0.05, -1)
            other = F.log_softmax(expected.float().flatten(0, 1) / 0.05, -1)
            if wrong:
                loss = F.kl_div(other, student.exp(), reduction="batchmean")
            else:
                loss = (student.exp() * (student - other)).sum(-1).mean()
            optimizer.zero_grad()
            (loss * 0.05**2).backward()
            optimizer.step()

    return Training(model, optimizer, train)


@bug(
    "NVIDIA/apex#379",
    "the logarithm is taken of a softmax in fp16: where that underflows to 0, the loss is inf",
    fair="underflow, inf or NaN, loss, skip",
    kind=DEFECT,
    precision="fp16",
)
def log_of_softmax(wrong: bool) -> Training:
    model = MLP(20, 64, 5)
    model.net[5].weight.data *= 100
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = scaler_of(256.0)

    def train(updates: int) -> None:
        for _ in range(updates):
            x, y = rows()
            with fp16():
                out = model(x)
            log_prob = out.softmax(-1).log() if wrong else out.float().log_softmax(-1)
            optimizer.zero_grad()
            scaler.scale(F.nll_loss(log_prob, y)).backward()
            scaler.step(optimizer)
            scaler.update()

    return Training(model, optimizer, train)


@bug(
    "PrimeIntellect-ai/prime-rl#2972",
    "the ratio of probabilities overflows at a stale token: inf times its mask of 0 is NaN",
    fair="inf or NaN, overflow, loss",
    kind=DEFECT,
    precision="bf16",
)
def ratio_overflows(wrong: bool) -> Training:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(updates: int) -> None:
        for i in range(updates):
            x, y = tokens()
            mask, advantage = (torch.rand(x.shape) < 0.9).float(), torch.randn(8, 1)
            old = torch.full(x.shape, -4.2)
            if i % 2 == 1:
                old[0, 3], mask[0, 3] = -100.0, 0.0
            with bf16():
                out = model(x)
            log_ratio = F.log_softmax(out.float(), -1).gather(-1, y[..., None]).squeeze(-1) - old
            ratio = (log_ratio if wrong else log_ratio.clamp(max=10)).exp()
            optimizer.zero_grad()
            (-(ratio * advantage * mask).sum() / mask.sum()).backward()
            optimizer.step()

    return Training(model, optimizer, train)


@bug(
    "fudannlp16/focal-loss#8",
    "a focal loss multiplies by gamma and not by the power of it",
    fair="loss",
    kind=FACT,
    precision="bf16",
)
def times_gamma(wrong: bool) -> Training:
    model = MLP(20, 64, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def focus(p: Tensor) -> Tensor:
        return p * 2.0 if wrong else p**2.0

    def train(updates: int) -> None:
        for _ in range(updates):
            x, y = rows()
            t = (y > 2).float()
            with bf16():
                out = model(x)
            p = torch.sigmoid(out.float().squeeze(-1)).clamp(1e-6, 1 - 1e-6)
            loss = -t * 0.25 * focus(1 - p) * p.log() - (1 - t) * 0.75 * focus(p) * (1 - p).log()
            optimizer.zero_grad()
            loss.mean().backward()
            optimizer.step()

    return Training(model, optimizer, train)


class Reconstruction(nn.Module):
    """An encoder, a decoder, and a judge of where a code comes from, which is not trained here."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = MLP(20, 64, 16), MLP(16, 64, 20)
        self.judge = MLP(16, 32, 1).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.encoder(x)
        return self.decoder(code), self.judge(code)


@bug(
    "guopengf/FL-MRCM#10",
    "the adversarial term is made a number before it is added to the loss, and trains nothing",
    fair="loss, gradient missing",
    kind=FACT,
    precision="bf16",
    expect={"terms_without_gradient": []},
)
def term_is_a_number(wrong: bool) -> Training:
    model = Reconstruction()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def train(updates: int) -> None:
        for _ in range(updates):
            x, _ = rows()
            with bf16():
                out, judged = model(x)
            term = F.mse_loss(judged.float(), torch.ones(32, 1))
            if wrong:
                term = term.detach().item()
            loss = F.l1_loss(out.float(), x) + 0.1 * term
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return Training(model, optimizer, train)


class Spectrogram(nn.Module):
    """A generator of an image from another, and a judge of images."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.judge = UNet(), ConvNet()
        self.judge.backbone[0], self.judge.fc = nn.Conv2d(1, 16, 3, padding=1), nn.Linear(32, 1)

    def forward(self, x: Tensor, of: str) -> Tensor:
        output: Tensor = getattr(self, of)(x)
        return output


@bug(
    "nikhilsinghmus/image2reverb#37",
    "the generator's image is detached before the judge sees it in the generator's own step: this term trains nothing",
    fair="loss, gradient missing",
    kind=FACT,
    precision="bf16",
    expect={"terms_without_gradient": []},
)
def generator_is_detached(wrong: bool) -> Training:
    model = Spectrogram()
    of_generator = torch.optim.Adam(model.generator.parameters(), lr=1e-3)
    of_judge = torch.optim.Adam(model.judge.parameters(), lr=1e-3)

    def train(updates: int) -> None:
        for _ in range(updates):
            x, _ = images()
            real = x.mean(1, keepdim=True)
            model.judge.requires_grad_(False)
            with bf16():
                fake = model(x, "generator")
                judged = model(fake.detach() if wrong else fake, "judge")
            loss = F.mse_loss(judged.float(), torch.ones(8, 1)) + 10 * F.l1_loss(fake.float(), real)
            of_generator.zero_grad()
            loss.backward()
            of_generator.step()
            model.judge.requires_grad_(True)
            with bf16():
                good, bad = model(real, "judge"), model(fake.detach(), "judge")
            loss = F.mse_loss(good.float(), torch.ones(8, 1)) + bad.float().square().mean()
            of_judge.zero_grad()
            loss.backward()
            of_judge.step()

    return Training(model, {"generator": of_generator, "judge": of_judge}, train)
