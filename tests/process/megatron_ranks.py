"""What each of megatron_world.py's processes runs: the cases of both files of tests."""

import warnings

warnings.simplefilter("error")

import megatron_world  # noqa: E402
import test_megatron  # noqa: E402
import test_megatron_models  # noqa: E402

from realsys.api import data  # noqa: E402


def rank_main(index, folder):
    data.LOGITS_AT_ONCE = 4 * megatron_world.VOCABULARY  # unlike what they are compared with
    rank = megatron_world.Rank(index, folder)
    test_megatron.rank_main(rank)
    test_megatron_models.rank_main(rank)
    rank.done()
