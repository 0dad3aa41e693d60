"""Pipelines of diffusers that are near a known family and not trained, each with the reason and the remedy."""

_SAME_WEIGHTS = {
    "StableDiffusion3Pipeline": ("Img2Img", "Inpaint", "PAG", "PAGImg2Img"),
    "FluxPipeline": ("Img2Img", "Inpaint"),
    "Flux2KleinPipeline": ("Inpaint",),
    "QwenImagePipeline": ("Img2Img", "Inpaint"),
    "QwenImageEditPipeline": ("Inpaint",),
    "SanaPipeline": ("PAG",),
    "WanPipeline": ("VideoToVideo",),
    "ZImagePipeline": ("Img2Img", "Inpaint"),
}
"""Pipeline -> what the names of others add to it that draw differently with the same parts."""
_CONTROL = "a second network steers its denoiser, and only denoisers are trained"
_EDIT = "its denoiser takes images beside the text, which a dataset here does not have"
_OTHER = "its denoiser is of another class"
_REASONS: dict[str, tuple[str, str]] = {
    "StableDiffusion3ControlNetPipeline": (_CONTROL, "StableDiffusion3Pipeline"),
    "StableDiffusion3ControlNetInpaintingPipeline": (_CONTROL, "StableDiffusion3Pipeline"),
    "FluxControlNetPipeline": (_CONTROL, "FluxPipeline"),
    "FluxControlNetImg2ImgPipeline": (_CONTROL, "FluxPipeline"),
    "FluxControlNetInpaintPipeline": (_CONTROL, "FluxPipeline"),
    "FluxControlPipeline": (_EDIT, "FluxPipeline"),
    "FluxControlImg2ImgPipeline": (_EDIT, "FluxPipeline"),
    "FluxControlInpaintPipeline": (_EDIT, "FluxPipeline"),
    "FluxFillPipeline": (_EDIT, "FluxPipeline"),
    "FluxKontextInpaintPipeline": (_EDIT, "FluxPipeline"),
    "FluxPriorReduxPipeline": ("it has no denoiser", "FluxPipeline"),
    "Flux2Pipeline": (
        "it has another text encoder (Mistral) than the klein models, and takes guidance as a number",
        "Flux2KleinPipeline",
    ),
    "Flux2KleinKVPipeline": ("it is distilled to few steps, which training would undo", "Flux2KleinPipeline"),
    "QwenImage21Pipeline": (_OTHER, "QwenImagePipeline"),
    "QwenImageControlNetPipeline": (_CONTROL, "QwenImagePipeline"),
    "QwenImageControlNetInpaintPipeline": (_CONTROL, "QwenImagePipeline"),
    "QwenImageLayeredPipeline": ("it draws several layers of an image", "QwenImagePipeline"),
    "ZImageControlNetPipeline": (_CONTROL, "ZImagePipeline"),
    "ZImageControlNetInpaintPipeline": (_CONTROL, "ZImagePipeline"),
    "ZImageOmniPipeline": (_EDIT, "ZImagePipeline"),
    "SanaControlNetPipeline": (_CONTROL, "SanaPipeline"),
    "SanaSprintPipeline": ("it is distilled to few steps, which training would undo", "SanaPipeline"),
    "SanaSprintImg2ImgPipeline": ("it is distilled to few steps, which training would undo", "SanaPipeline"),
    "SanaVideoPipeline": (_OTHER, "SanaPipeline"),
    "SanaImageToVideoPipeline": (_OTHER, "SanaPipeline"),
    "SanaWMPipeline": (_OTHER, "SanaPipeline"),
    "WanImageToVideoPipeline": (_EDIT, "WanPipeline"),
    "WanVACEPipeline": (_OTHER, "WanPipeline"),
    "WanAnimatePipeline": (_OTHER, "WanPipeline"),
    "PRXPixelPipeline": ("it has no VAE, and its denoiser predicts images and no velocity", "PRXPipeline"),
}
"""Pipeline -> why it is not trained, and the pipeline of the family that is."""
_MODULAR = "ModularPipeline"
_FAMILIES = {
    "StableDiffusion3": "StableDiffusion3Pipeline",
    "Flux2": "Flux2KleinPipeline",
    "Flux": "FluxPipeline",
    "QwenImage": "QwenImagePipeline",
    "ZImage": "ZImagePipeline",
    "Sana": "SanaPipeline",
    "Wan": "WanPipeline",
    "Krea2": "Krea2Pipeline",
    "PRX": "PRXPipeline",
}
"""First part of a class' name -> the family's pipeline."""
_OTHER_GENERATIONS = ("Flux3", "QwenImage21", "WanAnimate")


def same_weights(kind: str) -> str | None:
    """Return the pipeline of a family whose parts a class of another pipeline has; None if there is none."""
    for plain, additions in _SAME_WEIGHTS.items():
        if kind in (plain.replace("Pipeline", f"{addition}Pipeline") for addition in additions):
            return plain
    return None


def why_not_trained(kind: str) -> str | None:
    """Return why folders of a pipeline's class are not trained, and what to do; None for a class far from all families.

    Modular pipelines are blocks of code with parts from several repositories, so that no folder has a whole model.
    """
    if same := same_weights(kind):
        return f'it has the parts of a {same}; write "_class_name": "{same}" in the file to use it as one'
    if kind in _REASONS:
        reason, plain = _REASONS[kind]
        return f"{reason}; give a folder of {plain}"
    plain = next((plain for prefix, plain in _FAMILIES.items() if kind.startswith(prefix)), "")
    if not plain or not kind.endswith(_MODULAR):
        return None
    reason = _OTHER if kind.startswith(_OTHER_GENERATIONS) else "a modular pipeline has no complete model folder"
    return f"{reason}; give a folder of {plain}"
