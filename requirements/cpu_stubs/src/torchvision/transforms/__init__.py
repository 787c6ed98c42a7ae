"""Stand-in for torchvision.transforms: the interpolation modes are real, image processors name them at import."""

import enum

from fp8rl_cpu_stubs import missing_names


class InterpolationMode(enum.Enum):
    """torchvision's names and values."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


__getattr__ = missing_names(__name__)
