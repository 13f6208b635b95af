"""Controllers of the KL coefficient."""


class AdaptiveKLController:
    """Proportional controller that holds the mean sequence KL near a target (Ziegler et al. 2019, section 2.2)."""

    def __init__(self, init_kl_coef: float, target: float, horizon: float):
        self.value, self.target, self.horizon = init_kl_coef, target, horizon

    def update(self, current: float, n_steps: int) -> None:
        """Move the coefficient, given the batch's mean sequence KL (nats) and its number of samples."""
        error = min(max(current / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


class FixedKLController:
    """Keeps the coefficient where it is."""

    def __init__(self, kl_coef: float):
        self.value = kl_coef

    def update(self, current: float, n_steps: int) -> None:
        """Does nothing."""
