"""A network that learns in a few epochs: a fixed layer that whitens small patches, then three blocks.

Shapes: N samples, C channels, H height, W width, K classes, P patches, D = C * 4 values of a patch.
"""

import torch
from torch import nn
from torch.nn import functional

PATCH = 2  # height and width of a patch, pixels
EPSILON = 5e-4  # added to the variances: directions that hardly vary are noise, and are not blown up to unit variance
STATISTICS_MOMENTUM = 0.4
"""Weight of a batch in the running statistics of batch norm: weights change so fast that only the last few count."""
BIAS_RATE = 0.053 * 2_000 / 0.24
"""Learning rate of the biases over that of Muon's filters, where the dense layer has `SOURCE_FEATURES` inputs. In the
source: 0.053 and 0.24, for the summed loss of 2,000 samples."""
DENSE_RATE = 0.67 * 2_000 / 0.24 / 256**2
"""The same of the dense layer's weights: 0.67 there, where it is outputs that are divided by 256, and not weights."""
SOURCE_FEATURES = 256
_PATCHES_AT_ONCE = 2**18


class Whitening(nn.Conv2d):
    """A convolution whose filters turn patches into uncorrelated values of unit variance, and those negated.

    Its filters are the eigenvectors of the patches' covariance over the roots of their eigenvalues, found by `fit` and
    never trained; its biases are. The negated twins carry what is below zero through the activation.

    Source: Page, "How to Train Your ResNet 8: Bag of Tricks" (2019); with both signs: tysam-code, hlb-CIFAR10 (2023),
    and Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU" (2024).
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, 2 * channels * PATCH**2, PATCH)
        self.weight.requires_grad = False

    @torch.no_grad()
    def fit(self, images_NCHW: torch.Tensor) -> None:
        """Set the filters by the patches of images; the same images give the same filters."""
        num, channels, height, width = images_NCHW.shape
        num_values, num_patches = channels * PATCH**2, (height - PATCH + 1) * (width - PATCH + 1)
        sum_DD = torch.zeros(num_values, num_values, dtype=torch.float64)  # of outer products
        for images in images_NCHW.split(max(1, _PATCHES_AT_ONCE // num_patches)):
            patches_NDP = functional.unfold(images.double(), PATCH)
            sum_DD += (patches_NDP @ patches_NDP.mT).sum(0)
        eigenvalues_D, eigenvectors_DD = torch.linalg.eigh(sum_DD / (num * num_patches))
        # An eigenvector may as well be its negative: the largest of its values is made positive.
        largest_1D = eigenvectors_DD.abs().argmax(0, keepdim=True)
        eigenvectors_DD = eigenvectors_DD * eigenvectors_DD.gather(0, largest_1D).sign()
        filters_DD = (eigenvectors_DD / (eigenvalues_D + EPSILON).sqrt()).T
        self.weight.copy_(torch.cat((filters_DD, -filters_DD)).view_as(self.weight))


class Whitened(nn.Module):
    """Whitening, three blocks of two 3x3 convolutions, max-pool over what is left of the image, one dense layer.

    Batch norm has biases and no learned scales. Convolutions begin as the identity as far as they have inputs, and the
    dense layer small: its weights have the deviation 1 / inputs, which is the source's scaling of the outputs.

    Source: airbench94 of Jordan (2024), in the form of its successor with Muon (github.com/KellerJordan/
    cifar10-airbench), width 64; identity as the beginning: Zagoruyko and Komodakis, "DiracNets" (2017). There the
    whitening's biases are trained in the first three of eight epochs only, for speed; by its own trials, accuracy is
    the same without.
    """

    def __init__(self, image_shape: tuple[int, int, int], num_classes: int, width: int) -> None:
        super().__init__()
        rows, columns, channels = image_shape
        whitening = Whitening(channels)
        layers: list[nn.Module] = [whitening, nn.GELU()]
        num_inputs = whitening.out_channels
        for filters in (width, 4 * width, 4 * width):
            layers += [_convolution(num_inputs, filters), nn.MaxPool2d(2), _batch_norm(filters), nn.GELU()]
            layers += [_convolution(filters, filters), _batch_norm(filters), nn.GELU()]
            num_inputs = filters
        layers += [nn.MaxPool2d(((rows - 1) // 8, (columns - 1) // 8)), nn.Flatten()]
        self.features = nn.Sequential(*layers)
        self.classify = nn.Linear(num_inputs, num_classes, bias=False)
        nn.init.normal_(self.classify.weight, std=1 / num_inputs)

    @property
    def rate_factors(self) -> tuple[float, float]:
        """Factors of Muon's learning rate for the biases and for the dense layer.

        Gradients of biases go with the size of the dense layer's weights, so that their rate grows with its inputs, and
        its own falls (Yang and Hu et al., "Tensor Programs V", 2022, table 3, SGD): one tuning serves all widths.
        """
        widened = self.classify.in_features / SOURCE_FEATURES
        return BIAS_RATE * widened, DENSE_RATE / widened

    def forward(self, images_NCHW: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return `(logits_NK, None)`."""
        return self.classify(self.features(images_NCHW)), None


def _convolution(num_inputs: int, filters: int) -> nn.Conv2d:
    convolution = nn.Conv2d(num_inputs, filters, 3, padding=1, bias=False)
    nn.init.dirac_(convolution.weight.data[:num_inputs])
    return convolution


def _batch_norm(filters: int) -> nn.BatchNorm2d:
    # With torch's own epsilon: the source's 1e-12 would scale a channel that is constant by a million.
    norm = nn.BatchNorm2d(filters, momentum=STATISTICS_MOMENTUM)
    norm.weight.requires_grad = False
    return norm
