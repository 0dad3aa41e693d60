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
_OTHER = "its denoiser is of another class"
_REASONS = {
    "a second network steers its denoiser, and only denoisers are trained": (
        "StableDiffusion3ControlNetPipeline",
        "StableDiffusion3ControlNetInpaintingPipeline",
        "FluxControlNetPipeline",
        "FluxControlNetImg2ImgPipeline",
        "FluxControlNetInpaintPipeline",
        "QwenImageControlNetPipeline",
        "QwenImageControlNetInpaintPipeline",
        "ZImageControlNetPipeline",
        "ZImageControlNetInpaintPipeline",
        "SanaControlNetPipeline",
    ),
    "its denoiser takes images beside the text, which a dataset here does not have": (
        "FluxControlPipeline",
        "FluxControlImg2ImgPipeline",
        "FluxControlInpaintPipeline",
        "FluxFillPipeline",
        "FluxKontextInpaintPipeline",
        "ZImageOmniPipeline",
        "WanImageToVideoPipeline",
    ),
    "it has no denoiser": ("FluxPriorReduxPipeline",),
    "it has another text encoder (Mistral) than the klein models, and takes guidance as a number": ("Flux2Pipeline",),
    "it is distilled to few steps, which training would undo": (
        "Flux2KleinKVPipeline",
        "SanaSprintPipeline",
        "SanaSprintImg2ImgPipeline",
    ),
    _OTHER: (
        "QwenImage21Pipeline",
        "SanaVideoPipeline",
        "SanaImageToVideoPipeline",
        "SanaWMPipeline",
        "WanVACEPipeline",
        "WanAnimatePipeline",
    ),
    "it draws several layers of an image": ("QwenImageLayeredPipeline",),
    "it has no VAE, and its denoiser predicts images and no velocity": ("PRXPixelPipeline",),
}
"""Why pipelines are not trained -> which."""
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
    plain = next((plain for prefix, plain in _FAMILIES.items() if kind.startswith(prefix)), None)
    if plain is None:
        return None
    reason = next((reason for reason, kinds in _REASONS.items() if kind in kinds), None)
    if reason is None and kind.endswith("ModularPipeline"):
        is_other = kind.startswith(_OTHER_GENERATIONS)
        reason = _OTHER if is_other else "a modular pipeline has no complete model folder"
    return None if reason is None else f"{reason}; give a folder of {plain}"
