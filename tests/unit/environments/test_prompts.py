import pytest

from milesbatch.environments.arithmetic import ArithmeticStream
from milesbatch.environments.gym import GymStream
from milesbatch.environments.prompts import open_prompts, stream_seed
from milesbatch.environments.rewards import digit_match, exact_match, gym_score, last_number
from milesbatch.errors import RecipeError
from milesbatch.recipe.models import ArithmeticData, ReasoningGymData, Recipe

SUMS = {"task": "basic_arithmetic", "options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}


@pytest.mark.parametrize("data", [{"kind": "arithmetic", "operations": "+-*"}, {"kind": "reasoning_gym", **SUMS}])
def test_a_group_means_the_same_in_every_process_and_order(data):
    recipe = Recipe.model_validate({"name": "t", "seed": 5, "steps": 1, "model": {"kind": "made"}, "data": data})
    forwards = [open_prompts(recipe).prompt(g) for g in range(20)]
    backwards = open_prompts(recipe)
    assert [backwards.prompt(g) for g in reversed(range(20))][::-1] == forwards
    assert len({prompt.prompt_id for prompt in forwards}) == 20
    assert len({prompt.text for prompt in forwards}) > 10
    warm = [open_prompts(recipe, "warm_start").prompt(g).text for g in range(20)]
    other = open_prompts(recipe.model_copy(update={"seed": 6}))
    for different in (
        warm,
        [other.prompt(g).text for g in range(20)],
        [other.prompt(g - 1).text for g in range(1, 21)],
    ):
        assert sum(a.text == b for a, b in zip(forwards, different, strict=True)) < 8
    assert open_prompts(recipe).fingerprint() == backwards.fingerprint()


def test_arithmetic_is_right_and_within_its_operands():
    stream = ArithmeticStream(ArithmeticData(operations="+-*", min_operand=3, max_operand=7), seed=0)
    seen = set()
    for group in range(200):
        prompt = stream.prompt(group)
        assert prompt.text.endswith("=")
        assert eval(prompt.text[:-1]) == int(prompt.answer)
        seen |= {prompt.env["left"], prompt.env["right"]}
    assert seen == {3, 4, 5, 6, 7}


def test_operands_the_wrong_way_round():
    with pytest.raises(RecipeError, match="min_operand is 9"):
        ArithmeticStream(ArithmeticData(min_operand=9, max_operand=3), seed=0)


def test_the_seed_of_a_use_is_stable_and_its_path_counts():
    assert stream_seed(0, "a", 1) == stream_seed(0, "a", 1)
    assert len({stream_seed(0, "a", 1), stream_seed(0, "a", 2), stream_seed(1, "a", 1), stream_seed(0, "b", 1)}) == 4
    assert 0 <= stream_seed(0, "x") < 2**63


def test_gym_scores_with_the_tasks_own_function():
    prompt = GymStream(ReasoningGymData(**SUMS, instruction="Only the number."), seed=0).prompt(4)
    assert prompt.text.endswith("\nOnly the number.")
    assert gym_score(prompt, f" {prompt.answer}\n") == 1.0
    assert gym_score(prompt, f"I think <answer>{prompt.answer}</answer>") == 1.0
    assert gym_score(prompt, "") == 0.0
    assert 0 < gym_score(prompt, f"It is {prompt.answer}") < 1


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"task": "basic_aritmetic"}, "basic_arithmetic"),
        ({"task": "basic_arithmetic", "options": {"min_term": 2}}, "min_terms"),
        ({"task": "basic_arithmetic", "options": {"min_terms": 0}}, "min_terms must be positive"),
    ],
)
def test_a_wrong_task_or_option_is_a_recipe_error(data, says):
    with pytest.raises(RecipeError, match=says):
        GymStream(ReasoningGymData(**data), seed=0)


def test_rewards_that_come_with_the_package():
    prompt = ArithmeticStream(ArithmeticData(min_operand=60), seed=0).prompt(0)
    answer = prompt.answer
    assert exact_match(prompt, f" {answer} ") == 1.0
    assert exact_match(prompt, f"{answer}.") == 0.0
    assert last_number(prompt, f"First 7, then it is {answer}.") == 1.0
    assert last_number(prompt, f"{answer} and not 7") == 0.0
    assert last_number(prompt, "no number") == 0.0
    assert sum(digit_match(prompt, answer).values()) == 1.0
    assert 0 < sum(digit_match(prompt, "x" + answer[1:]).values()) < 0.5
