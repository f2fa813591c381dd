"""Random numbers as a pure function of a number: the same on any device layout, number of ranks, and after a resume.

A counter-based generator: each value is a hash of its place, so nothing has a state. The hash is the finalizer of
SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014), from whose halves Box and
Muller (1958) make two normal values. Not for secrets.
"""

import math

import torch

_GAMMA, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB as signed 64 bits."""
_LOW = 2**32 - 1


def gaussian(noise_seeds_N: torch.Tensor, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Standard normal values (N, *shape), float32, those of a sample a function of its draw and the seed alone."""
    num = math.prod(shape)
    pairs_M = torch.arange((num + 1) // 2, device=noise_seeds_N.device, dtype=torch.int64)
    keys_N = _mix(_mix(noise_seeds_N) ^ _mix(torch.full_like(noise_seeds_N, seed)))
    bits_NM = _mix(keys_N[:, None] + pairs_M * _GAMMA)
    # In (0, 1]: the logarithm of 0 is none.
    radius_NM = (-2.0 * torch.log(((bits_NM & _LOW) + 1).to(torch.float32) / 2**32)).sqrt_()
    angle_NM = ((bits_NM >> 32) & _LOW).to(torch.float32) * (2 * math.pi / 2**32)
    values_NV = torch.cat([radius_NM * angle_NM.cos(), radius_NM * angle_NM.sin()], dim=1)
    return values_NV[:, :num].reshape(len(noise_seeds_N), *shape)


def uniform(noise_seeds_N: torch.Tensor, num: int, seed: int) -> torch.Tensor:
    """Values (N, num) in [0, 1), float64, other than those of `gaussian`; the first ones do not depend on `num`."""
    keys_N = _mix(_mix(noise_seeds_N) ^ ~_mix(torch.full_like(noise_seeds_N, seed)))
    places_M = torch.arange(num, device=noise_seeds_N.device, dtype=torch.int64)
    bits_NM = _mix(keys_N[:, None] + places_M * _GAMMA)
    return ((bits_NM >> 11) & (2**53 - 1)).to(torch.float64) / 2**53


def _mix(values: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer; int64 wraps around, and its shift fills with the sign, which is masked off."""
    values = values + _GAMMA
    values = (values ^ ((values >> 30) & (2**34 - 1))) * _FIRST
    values = (values ^ ((values >> 27) & (2**37 - 1))) * _SECOND
    return values ^ ((values >> 31) & (2**33 - 1))
