"""Real text tokens on a GPU: fused kernels mask padding, in bf16 and compiled."""

import pytest
import torch

from sd3_light.config import SIZES
from sd3_light.core.compiling import compile_blocks
from sd3_light.families.sd3.layers import build_layers, run_layers
from sd3_light.families.sd3.random_weights import new_transformer
from tests.project import Project

LENGTHS = (21, 1, 9)  # not multiples of 8: kernels need aligned masks


def outputs(dtype: torch.dtype, compiled: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the patches of three samples, batched with garbage as text padding, and one by one without."""
    transformer = new_transformer(SIZES["tiny3"].transformer_config(), 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    shapes = ((3, 16, 8, 6), (3,), (3, max(LENGTHS), 256), (3, 224))
    noisy, times, prompt, pooled = (torch.randn(shape, generator=generator).cuda() for shape in shapes)
    layers = build_layers(transformer.cuda(), real_text=True)
    if compiled:
        compile_blocks(transformer)
    lengths = torch.tensor(LENGTHS).cuda()
    with torch.no_grad(), torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        together = run_layers(layers, [noisy, times, prompt, pooled, lengths])[0]
        alone = [
            run_layers(layers, [part[at : at + 1] for part in (noisy, times, prompt[:, :count], pooled, lengths)])[0]
            for at, count in enumerate(LENGTHS)
        ]
    return together.float(), torch.cat(alone).float()


@pytest.mark.parametrize("compiled", [False, True])
def test_padding_has_no_effect(compiled: bool) -> None:
    together, alone = outputs(torch.float32, compiled)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


def test_padding_has_no_effect_in_bf16() -> None:
    (together, alone), (exact, _) = outputs(torch.bfloat16), outputs(torch.float32)
    rounding = float((alone - exact).abs().max())
    assert 0 < rounding < 0.1 * float(exact.abs().max())
    assert float((together - alone).abs().max()) < 2 * rounding


def test_a_run_on_real_tokens(fresh_project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sd3_light.export.diffusers_folder.prove", lambda *_: {})
    for dtype in ("float32", "bfloat16"):
        settings = (f'output_dir="{dtype}"', f'model.transformer_dtype="{dtype}"', 'model.text_tokens="real"')
        fresh_project.train(*settings, "max_steps=3")
    exact, rough = (list(fresh_project.losses(dtype).values()) for dtype in ("float32", "bfloat16"))
    assert rough == pytest.approx(exact, rel=2e-2)
