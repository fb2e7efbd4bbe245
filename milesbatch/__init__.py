"""milesbatch: reinforcement learning of language models as batch jobs.

The main loop in one hop: :mod:`milesbatch.cli.run` -> :mod:`milesbatch.controller.loop` ->
:mod:`milesbatch.trainer.loop` and :mod:`milesbatch.rollout.loop`.
"""

__version__ = "0.1.0"

FORMAT_VERSION = (1, 1)
"""Version of the run directory (major, minor); see ``docs/format.md``. A reader stops at a newer major."""
