"""Lets ``import torchvision`` work beside a CPU build of torch. Test-only; loaded at start-up by rollmesh_shims.pth.

SGLang imports torchvision whatever model it serves. The wheel of torchvision on the package index is linked against
CUDA: beside a CPU build of torch its library of C++ operators is not loaded, and torchvision's Python code then fails
as it adds fake kernels to the operators ``nms`` and ``qnms``, which are not declared. So we declare these two
operators, without any code behind them, right before torchvision is imported for the first time. A model without
images never calls them; a call would raise.

Nothing happens where torch has CUDA: there torchvision brings its own operators.
"""

import importlib.abc
import sys

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _DeclareOperators(importlib.abc.MetaPathFinder):
    """Finds no module itself: it takes the search for torchvision as the sign to declare the operators."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            self._declare()
        return None

    def _declare(self):
        import torch

        if torch.version.cuda is not None:
            return
        # A Library takes its operators along when it is collected: this object is kept by the module below.
        self.library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            self.library.define(operator + _SCHEMA)


finder = _DeclareOperators()
sys.meta_path.insert(0, finder)
