"""What the GPUs of a run send each other in a step, and the network that this needs. Pure."""

from sd3_light.cost.amount import Amount
from sd3_light.cost.training_setup import TrainingSetup


def sent_per_step(setup: TrainingSetup) -> Amount:
    """Return the bytes that a GPU sends per step; it receives as many. None are sent by one GPU.

    Collectives are counted as rings, which send least: of n GPUs each sends (n - 1) / n of a tensor that is gathered or
    whose sum is scattered, and twice that if all get the sum. Pipelines also send activations, which are not counted.
    """
    share = (setup.replicas - 1) / setup.replicas
    rounds = setup.accumulation
    ring = f"({setup.replicas} - 1)/{setup.replicas}"
    gradients = 4 * setup.trained_parameters
    if setup.zero_stage is None and setup.shards > 1:
        width = 4 if setup.compute_dtype == "float32" else 2
        value = share * (2 * rounds * width * setup.parameters + gradients)
        text = f"{rounds} micro-batches" if rounds > 1 else "each micro-batch"
        return Amount(round(value), f"{ring}·(2·{width}·P in {text} + 4·trained): blocks gathered twice, gradients")
    if setup.zero_stage == 3:
        value = share * rounds * (2 * 4 * setup.parameters + gradients)
        return Amount(round(value), f"{ring}·{rounds}·(2·4·P + 4·trained): weights gathered twice, gradients")
    if setup.zero_stage == 2:
        value = share * (rounds + 1) * gradients
        return Amount(round(value), f"{ring}·({rounds} + 1)·4·trained: gradients of each micro-batch, then weights")
    return Amount(round(2 * share * gradients), f"2·{ring}·4·trained: gradients are averaged once")


def needed_bandwidth(sent: int, seconds: float) -> float:
    """Return the bits per second that a GPU must send so that ``sent`` bytes hide behind ``seconds`` of computing."""
    return 8 * sent / seconds
