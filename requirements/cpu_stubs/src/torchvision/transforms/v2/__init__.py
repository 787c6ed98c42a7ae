"""Stand-in for torchvision.transforms.v2."""

from fp8rl_cpu_stubs import missing_names

from torchvision.transforms import InterpolationMode

__all__ = ["InterpolationMode"]
__getattr__ = missing_names(__name__)
