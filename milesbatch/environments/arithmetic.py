"""An endless seeded stream of small arithmetic problems such as ``12+34=``.

Owns how a group id becomes a problem. Never looks at another group. Invariant: problem ``g`` is a pure function of (seed,
data section, purpose, g).
"""

from __future__ import annotations

from milesbatch.environments.prompts import Message, Prompt, Purpose, stream_random
from milesbatch.errors import RecipeError
from milesbatch.recipe.models import ArithmeticData
from milesbatch.records import canonical_json, digest_bytes


class ArithmeticStream:
    """Problems drawn uniformly over the operands and operators of the recipe."""

    def __init__(self, data: ArithmeticData, seed: int, purpose: Purpose = "train") -> None:
        """Check the section.

        Raises:
            RecipeError: the operands leave nothing to draw from.
        """
        if data.min_operand > data.max_operand:
            raise RecipeError(
                f"data.min_operand is {data.min_operand}, more than data.max_operand ({data.max_operand})",
                mend="choose min_operand <= max_operand",
            )
        self._data = data
        self._seed = seed
        self._purpose = purpose

    def prompt(self, group_id: int) -> Prompt:
        """The problem of a group; ``env`` holds its operands and operator."""
        data = self._data
        draw = stream_random(self._seed, "arithmetic", self._purpose, group_id)
        left = draw.randint(data.min_operand, data.max_operand)
        right = draw.randint(data.min_operand, data.max_operand)
        operation = data.operations[draw.randrange(len(data.operations))]
        text = f"{left}{operation}{right}="
        return Prompt(
            prompt_id=f"arithmetic-{self._purpose}-{group_id}",
            messages=(Message("user", text),),
            answer=str(_result(left, operation, right)),
            env={"left": left, "operation": operation, "right": right},
        )

    @property
    def num_prompts(self) -> None:
        """There is no end."""

    def fingerprint(self) -> str:
        """Digest of the data section."""
        return digest_bytes(canonical_json(self._data.model_dump(mode="json")))


def _result(left: int, operation: str, right: int) -> int:
    if operation == "+":
        return left + right
    if operation == "-":
        return left - right
    return left * right
