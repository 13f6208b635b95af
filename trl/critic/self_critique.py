"""Self-critique: the policy's own base weights as the critic, with no second copy in memory."""

from collections.abc import Sequence

from peft import PeftModel

from trl.critic.types import Critic, Critique, CritiqueRequest


class SelfCritic:
    """Lets ``critic``, which works with the base model inside ``policy``, answer with the adapters off.

    The switch is a state of the shared model, so nothing else may use it meanwhile: wait for a critique before
    the trainer's next pass. The model is in evaluation mode while it answers, and as it was afterwards.

    Args:
        policy: the PEFT model that is being trained.
        critic: a `LocalCritic` of ``policy.get_base_model()``.
    """

    def __init__(self, policy: PeftModel, critic: Critic):
        self._policy, self._critic = policy, critic

    def critique(self, requests: Sequence[CritiqueRequest]) -> list[Critique]:
        """One critique per request, in order."""
        was_training = self._policy.training
        self._policy.eval()
        try:
            with self._policy.disable_adapter():
                return self._critic.critique(requests)
        finally:
            self._policy.train(was_training)
