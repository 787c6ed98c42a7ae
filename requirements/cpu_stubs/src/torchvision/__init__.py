"""CPU stand-in for torchvision: SGLang and transformers import it, text models never call it."""

from fp8rl_cpu_stubs import refuse_with_cuda

refuse_with_cuda("torchvision", "torchvision")

__version__ = "0.0.0+cpustub"
