"""Convolutional networks with batch norm, ReLU and max pooling, as a first lecture on vision shows them."""

from torch import Tensor, nn


class MnistCnn(nn.Module):
    """Images ``[N, 1, 28, 28]`` to the logits of ten classes ``[N, 10]``: two convolutions of 3 x 3, one linear layer.
    The first convolution has ``width`` channels, the second twice as many."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU()
        self.pool1 = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(2 * width)
        self.relu2 = nn.ReLU()
        self.pool2 = nn.MaxPool2d(2)
        self.output = nn.Linear(2 * width * 7 * 7, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool1(self.relu1(self.norm1(self.conv1(x))))  # [N, width, 14, 14]
        x = self.pool2(self.relu2(self.norm2(self.conv2(x))))  # [N, 2 width, 7, 7]
        return self.output(x.flatten(1))


class CifarCnn(nn.Module):
    """Images ``[N, 3, 32, 32]`` to the logits of ten classes ``[N, 10]``: three stages and the average over all places.
    The first stage has ``width`` channels, each further stage twice as many."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stage1 = Stage(3, width)
        self.stage2 = Stage(width, 2 * width)
        self.stage3 = Stage(2 * width, 4 * width)
        self.average = nn.AdaptiveAvgPool2d(1)
        self.output = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage3(self.stage2(self.stage1(x)))  # [N, 4 width, 4, 4]
        return self.output(self.average(x).flatten(1))


class Stage(nn.Module):
    """``[N, channels_in, H, W]`` to ``[N, channels_out, H / 2, W / 2]``: two convolutions of 3 x 3, max pooling."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.relu2 = nn.ReLU()
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu1(self.norm1(self.conv1(x)))
        return self.pool(self.relu2(self.norm2(self.conv2(x))))
