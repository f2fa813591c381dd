"""A network for clips: features of each frame by convolutions, then a recurrent head over the frames.

A clip is an image whose channels are the colours of its frames, one frame after the other (infra/decisions/0021).
Shapes: N clips, T frames, M = N * T, C channels, H height, W width, D features, K classes.
"""

import torch
from torch import nn

from paceline.conf.data import NUM_COLOURS
from paceline.conf.model import Model
from paceline.tasks.model.networks.blocks import conv_blocks, keep_format

GRID = 4
"""Features are averaged over a grid of so many fields each way, and not over the frame: what moves is somewhere."""


class SequenceNet(nn.Module):
    """Classifies clips whose channels are the colours of all frames."""

    def __init__(self, image_shape: tuple[int, int, int], num_classes: int, model: Model) -> None:
        super().__init__()
        self.num_frames = image_shape[2] // NUM_COLOURS
        self.features, channels = conv_blocks(NUM_COLOURS, model.width, model.depth)
        self.pool = nn.AdaptiveAvgPool2d(GRID)
        # Normalised: where something is makes a small difference to what is everywhere, and it is all that moves.
        self.embed = nn.Sequential(
            nn.Linear(channels * GRID * GRID, channels, bias=False), nn.BatchNorm1d(channels), nn.ReLU()
        )
        self.over_time = Recurrent(channels)
        self.classify = nn.Linear(channels, num_classes)

    def forward(self, images_NCHW: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return `(logits_NK, None)`."""
        frames_MCHW = images_NCHW.unflatten(1, (self.num_frames, NUM_COLOURS)).flatten(0, 1)
        embedded_MD = self.embed(self.pool(keep_format(self.features(frames_MCHW))).flatten(1))
        return self.classify(self.over_time(embedded_MD.unflatten(0, (-1, self.num_frames)))), None


class Recurrent(nn.Module):
    """Gated recurrent units over the frames; the prediction uses their last state.

    In plain operations and not as `nn.GRU`: that one is not compiled, and under autocast on CPUs takes no bfloat16.

    Source: Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder" (2014), with the reset gate behind
    the matrix as cuDNN and `nn.GRU` have it.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.see = nn.Linear(size, 3 * size)
        self.remember = nn.Linear(size, 3 * size)

    def forward(self, features_NTD: torch.Tensor) -> torch.Tensor:
        """The state (N, D) after the last frame."""
        seen_NTG = self.see(features_NTD)
        state_ND = torch.zeros_like(seen_NTG[:, 0].chunk(3, dim=1)[0])
        for seen_NG in seen_NTG.unbind(1):
            reset_ND, keep_ND, new_ND = seen_NG.chunk(3, dim=1)
            from_reset_ND, from_keep_ND, from_new_ND = self.remember(state_ND).chunk(3, dim=1)
            proposed_ND = torch.tanh(new_ND + torch.sigmoid(reset_ND + from_reset_ND) * from_new_ND)
            state_ND = torch.lerp(proposed_ND, state_ND, torch.sigmoid(keep_ND + from_keep_ND))
        return state_ND
