"""Import stand-in for ``sgl_kernel``, which has no CPU build on the package index. Test-only.

SGLang's CPU path imports functions from this package by name, most of them for speculative decoding and quantised
weights. A dense model with ``--attention-backend torch_native`` calls none of them: matrix products, attention, norms
and sampling are torch's. So here every name exists and every call raises: a test whose tokens would have come out of
a made-up kernel cannot pass.
"""

__version__ = "0.0.0+import.only"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} was called, but this environment has no kernels")

    kernel.__name__ = kernel.__qualname__ = name
    return kernel
