"""Export torchvision's Swin-T (Liu et al., arXiv 2103.14030: windows of 7, depths 2, 2, 6, 2) and calibration images.

No trained weights travel with mptune, so they are drawn as for the ViT-S: truncated normal, norm gains log-normal, so
that the blocks differ as trained ones do. Needs torchvision.

    python -m benchmarks.models.swin_t --out swin_t --batch 8     # swin_t.onnx (114 MB) and swin_t.npz
"""

from __future__ import annotations

from torch import nn
from torchvision.models import swin_t

from benchmarks.models.exporting import draw_uneven_weights, export, parse
from benchmarks.models.vit_s import natural_noise


def main() -> None:
    options = parse(__doc__, "swin_t")
    model = swin_t(weights=None).eval()
    draw_uneven_weights(model, options.seed, lambda weight: nn.init.trunc_normal_(weight, std=0.04))
    images = natural_noise(options.batch * options.samples, options.seed + 1)
    export(model, options, {"image": images}, ["logits"])


if __name__ == "__main__":
    main()
