"""Every metric that realsys writes: name, meaning, healthy range, verl's name. Pure; docs/metrics.md is
written from it.

A metric has verl's name where both are the same by definition: numerator, denominator and unit. An
interface returns statistics under names of its own; ``current_name`` turns ``<call>/<statistic>`` into the
metric's name. Rows of trials from before the renaming go through the same table when they are read.

An author of a metric adds a line here and runs ``python -m realsys.observability.write_metrics_page``.
"""

# ruff: noqa: E501

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SAME = "same"


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of the catalogue.

    Attributes:
        name: as in ``metrics.jsonl``; ``<…>`` stands for one part, ``<part>`` and ``<figure>`` for several.
        unit: of the number; empty if it has none.
        healthy: range or course in a run that learns; empty where any is.
        otherwise: what to look at or change outside it.
        verl: ``SAME``, the difference to verl's metric, or empty if verl has none.
        written: ``<call>/<statistic>`` of the interface that returns it, where that is not the name.
    """

    name: str
    unit: str
    meaning: str
    healthy: str = ""
    otherwise: str = ""
    verl: str = ""
    written: str = ""


# One metric a line, as in a table.
# fmt: off
GROUPS: dict[str, tuple[Metric, ...]] = {
    "Reward and length": (
        Metric("critic/score/mean", "", "mean of the rule's scores over the step's answers, as given", "rises; held-out accuracy with it", "flat: `actor/groups/equal_scores`, the rule on a few of `samples.jsonl`; rises alone: the rule is being gamed", verl=SAME, written="actor_train/reward/mean"),
        Metric("critic/score/std", "", "standard deviation of the same", "above 0", "0: nothing to compare, so nothing is learned; easier or harder questions", written="actor_train/reward/std"),
        Metric("response_length/mean", "tokens", "length of an answer, its end token included", "changes slowly, stays below `gen.max_new_tokens`", "at the limit: `actor/no_eos_ratio`", verl=SAME, written="actor_train/response_length/mean"),
        Metric("response_length/max", "tokens", "the longest answer", verl=SAME, written="actor_train/response_length/max"),
        Metric("actor/no_eos_ratio", "share", "answers that were cut off", "below 0.1, not rising", "raise `gen.max_new_tokens`, or set `algorithm.overlong_buffer_len`", verl="`response_length/clip_ratio` also counts answers that end at the very limit"),
        Metric("actor/reward/overlong_penalty", "", "mean penalty of overlong answers, with `overlong_buffer_len`", "towards 0", "grows: answers do not learn to be shorter; a larger `overlong_penalty_factor`"),
        Metric("actor/reward/answers_set_aside", "answers", "answers to records that got no reward; in no other figure; only in steps that have some", "absent", "`record set aside` in the logs of the workers that score"),
        Metric("rew_inf/reward/raised", "answers", "answers of the step that scored 0 since the rule failed on their text: it raised, exceeded a limit, or gave no finite number; of a mixture `rew_inf/reward/<source>/raised`; only in steps that have some", "absent, or falls", "`its rule failed on` in the logs of the workers that score: the first texts; ask for the form that the rule reads"),
        Metric("actor/groups/equal_scores", "questions", "questions whose answers all scored the same: they teach nothing (without a critic)", "below half of `actor/groups/compared`", "questions of middling difficulty; a larger `group_size`"),
        Metric("actor/groups/compared", "questions", "questions with two answers or more"),
        Metric("actor/n_sequences", "answers", "answers of the step that have a reward"),
        Metric("actor/n_tokens", "tokens", "tokens of the step, prompts included", verl="`perf/total_num_tokens`; here `perf/` is for what a clock measured"),
        Metric("rew_inf/reward/unfinished_thoughts", "share", "answers with nothing behind their thoughts, of those with thoughts; they score 0", "below 0.1, not rising", "raise `gen.max_new_tokens`; `task.reward_args.<rule>.score_unfinished_thoughts`"),
        Metric("rew_inf/reward/<part>", "", "mean of a named part of the rewards; of a mixture by source, with `/correct` and `/share`"),
    ),
    "Policy": (
        Metric("actor/actor_loss", "", "the loss that was minimised, entropy bonus included", "small, around 0: its course says little", verl="`actor/pg_loss` is without the bonus; the same with `entropy_coef=0`"),
        Metric("actor/pg_clipfrac", "share", "tokens where a bound of the loss held (`algorithm.loss`)", "0.001 to 0.2; gspo up to 0.3", "above: lower learning rate, fewer epochs or minibatches", verl=SAME, written="actor_train/clip_ratio"),
        Metric("actor/pg_clipfrac_lower", "share", "tokens where the dual clip bounded the loss", "near 0", "as for `actor/pg_clipfrac`", verl=SAME, written="actor_train/dual_clip_ratio"),
        Metric("actor/approx_kl", "nats a token", "KL to the denominator of the ratio, k3: `exp(d) − 1 − d`", "below 0.02", "lower learning rate; `early_stop_kl`", verl="`actor/ppo_kl` is k1, the mean of d, and may be negative"),
        Metric("actor/importance_weight", "", "mean ratio of new to old probability", "0.95 to 1.05", "as for `actor/approx_kl`"),
        Metric("actor/entropy", "nats a token", "entropy at the sampling temperature, mean over the update's minibatches", "falls slowly, stays above 0.05", "falls at once: `entropy_coef`, a larger `eps_clip_higher`, lower learning rate; rises: the policy dissolves, lower the learning rate or `entropy_coef`", verl="measured before the update, aggregated like the loss"),
        Metric("actor/grad_norm", "", "norm of the gradient before it is clipped, mean over minibatches", "steady; 0 in a step without an update", "jumps: lower learning rate, more warm-up; look at that step's answers", verl=SAME),
        Metric("actor/lr", "", "learning rate", verl=SAME),
        Metric("actor/first_minibatch/pg_clipfrac", "share", "`actor/pg_clipfrac` of the first minibatch alone", "0 in a synchronous run", "not 0: sampling and training compute differently; temperature, dtype, kernels", written="actor_train/first_minibatch/clip_ratio"),
        Metric("actor/first_minibatch/importance_weight", "", "mean ratio of the first minibatch", "1 in a synchronous run", "as above"),
        Metric("actor/first_minibatch/max_abs_log_ratio", "nats", "largest difference of a token's log-probabilities in the first minibatch", "below 1e-4 in float32, 0.1 in bfloat16, in a synchronous run", "as above"),
        Metric("actor/early_stopped", "0 or 1", "1 if minibatches were left out by an early-stopping limit", "mostly 0", "lower learning rate"),
        Metric("actor/empty_minibatches", "minibatches", "those from which nothing could be learned: masks left no token, or all advantages were 0", "0", "as for `actor/groups/equal_scores`"),
        Metric("actor/skipped_steps", "steps", "optimizer steps left out, as their gradient was not finite; other figures are of the rest; only in steps that have some", "absent", "the batch is in `skipped_batches/` of the trial's folder: extreme rewards or log-probabilities; lower the learning rate. `<role>.optimizer.max_skipped_steps` in a row end the run", verl="skips too, and counts none"),
        Metric("actor/advantage/mean", "", "over answer tokens, before whitening", "near 0", "with a critic: `critic/vf_explained_var`", verl="`critic/advantages/mean` is after whitening"),
        Metric("actor/advantage/std", "", "the same's standard deviation", "above 0"),
        Metric("actor/kl_ref/per_sequence", "nats an answer", "log π_old − log π_ref, summed over an answer", "rises slowly from 0", "runs away: larger `kl_ctl`, lower learning rate", verl="`actor/reward_kl_penalty` is a mean over an answer's tokens"),
        Metric("actor/kl_ref/per_token", "nats a token", "the same over the mean length", "below 0.1"),
        Metric("actor/reward_kl_penalty_coeff", "", "β of the KL in this step, in the reward or in the loss", "constant; with `use_adaptive_kl_ctl` it settles", verl=SAME, written="actor_train/kl_coef"),
        Metric("actor/kl_loss", "nats a token", "the KL to the reference as `kl_estimator` has it, with `kl_in=loss`", "rises slowly from 0", "as for `actor/kl_ref/per_sequence`", verl="aggregated like the loss"),
        Metric("actor/loss/<component>", "", "components of the loss, each over its own count: `policy` with KL and entropy bonus; `nll`, with `nll_coef`"),
        Metric("actor/drifted", "share", "tokens of answers that `opsm_delta` left out", "below 0.1", "lower learning rate, fewer minibatches, lower `max_staleness`"),
        Metric("actor/entropy_coef", "", "weight of the entropy bonus in this step, with `entropy_target`", "settles; 0 above the target"),
        Metric("actor/teacher/<teacher>/forward_kl", "nats a token", "KL of the teacher to π over the teacher's `top_k` most probable tokens", "falls towards 0", "as below"),
        Metric("actor/teacher/<teacher>/kl", "nats a token", "log π_old − log π of the teacher: the reverse KL to it", "falls towards 0", "steady: higher learning rate; the teacher may know what the policy can't"),
    ),
    "Critic": (
        Metric("critic/vf_loss", "", "half the squared error, clipped; in normalised units with `value_norm`", "falls, then steady", "rises: lower the critic's learning rate", verl=SAME, written="critic_train/value_loss"),
        Metric("critic/vf_clipfrac", "share", "tokens where clipping raised the loss", "below 0.3", "a larger `value_eps_clip`, or a lower learning rate", verl=SAME, written="critic_train/value_clip_ratio"),
        Metric("critic/vf_explained_var", "", "1 − var(R − V) / var(R) before the update; 0 where all returns are equal", "above 0 after a few steps, towards 1", "below 0: worse than a constant; `critic_warmup_steps`, a higher critic's learning rate", verl="same, but for 1e-5 in its denominator", written="critic_train/explained_variance"),
        Metric("critic/returns/mean", "", "mean return over answer tokens", "follows `critic/score/mean`", verl=SAME, written="critic_train/return/mean"),
        Metric("critic/values/mean", "", "mean value of the states before answer tokens", "near `critic/returns/mean`", "as for `critic/vf_explained_var`", verl=SAME, written="critic_train/value/mean"),
        Metric("critic/grad_norm", "", "norm of the gradient before it is clipped", "steady", "as for `actor/grad_norm`", verl=SAME),
        Metric("critic/lr", "", "learning rate", verl=SAME),
        Metric("critic/skipped_steps", "steps", "as `actor/skipped_steps`", "absent"),
    ),
    "Off-policy": (
        Metric("actor/staleness/mean", "steps", "lag of an answer's oldest token", "at most `schedule.max_staleness`"),
        Metric("actor/staleness/max", "steps", "the largest of them", "at most `schedule.max_staleness`: more ends the run"),
        Metric("actor/staleness/mixed_sequences", "share", "answers with tokens of several versions"),
        Metric("actor/staleness/tokens_by_lag/<lag>", "share", "answer tokens of lag 0, 1, 2, 3, 4_or_more"),
        Metric("actor/staleness/tokens_checked", "tokens", "those that were held against `max_staleness`"),
        Metric("actor/mismatch/kl_k3", "nats a token", "KL of sampling to proximal policy, k3, at most 10 a token", "below 0.01", "`actor/mismatch/kl_k3_lag_0` says whether it is age or arithmetic; lower `max_staleness` or learning rate", verl="`rollout_corr/k3_kl` has no bound"),
        Metric("actor/mismatch/kl_k3_lag_0", "nats a token", "the same of tokens by the current weights", "below 0.002", "sampling and training compute differently: weights, temperature, dtype, kernels"),
        Metric("actor/mismatch/abs_mean", "nats", "mean difference of log-probabilities, without sign", "below 0.1", "as above"),
        Metric("actor/mismatch/abs_max", "nats", "the largest of them; without proximal log-probabilities that of the first minibatch, so every run has it", "below 1e-4 in float32, 0.1 in bfloat16, of tokens by the current weights", "as above"),
        Metric("training/rollout_probs_diff_mean", "", "mean difference of probabilities, without sign", "below 0.02", "as above", verl=SAME, written="actor_train/mismatch/prob_abs_mean"),
        Metric("actor/mismatch/weight_mean", "", "mean of w = proximal over sampling probability, before any bound", "0.95 to 1.05", "as for `actor/mismatch/kl_k3`", verl="`rollout_corr/rollout_is_mean` is after the bound"),
        Metric("actor/mismatch/weight_max", "", "the largest w"),
        Metric("actor/mismatch/ess", "share", "effective sample size of w over the number of tokens: `(Σ w)² / (n Σ w²)`", "above 0.8", "lower `max_staleness`", verl="`rollout_corr/rollout_is_eff_sample_size` is of bounded weights"),
        Metric("actor/mismatch/skipped", "0 or 1", "1 if the policy was left alone (`on_mismatch=skip`)", "0", "as for `actor/mismatch/kl_k3`"),
        Metric("actor/correction/weight_mean", "", "mean of the weights that were used, 0 where masked", "0.8 to 1.05", "as for `actor/mismatch/kl_k3`", verl="`rollout_corr/rollout_is_mean` leaves masked tokens out"),
        Metric("actor/correction/ess", "share", "their effective sample size", "above 0.8"),
        Metric("actor/correction/masked", "share", "tokens that were left out", "below 0.1", "as for `actor/mismatch/kl_k3`"),
        Metric("actor/correction/clamped", "share", "tokens whose weight was held at the bound", "below 0.1", "as above"),
    ),
    "Rollouts of asynchronous runs": (
        Metric("rollout/reward", "", "mean reward of the answers that came in since the last step, filtered ones included", "rises", "as for `critic/score/mean`"),
        Metric("rollout/reward/unfinished_thoughts", "share", "answers with nothing behind their thoughts, of those with thoughts", "below 0.1, not rising", "`rew_inf/reward/unfinished_thoughts`"),
        Metric("rollout/reward/raised", "answers", "as `rew_inf/reward/raised`, since the last step; of a mixture `rollout/reward/<source>/raised`", "absent, or falls", "`its rule failed on` in the logs of rollout workers or reward workers"),
        Metric("rollout/reward/<part>", "", "a named part of it; of a mixture by source"),
        Metric("rollout/answer_length", "tokens", "mean length of their answers"),
        Metric("rollout/truncated", "share", "answers that were cut off", "below 0.1", "`actor/no_eos_ratio`"),
        Metric("rollout/agent/<figure>", "", "mean of a number that the agent or environment reports; `turns` by multi-turn agents"),
        Metric("rollout/seconds", "s", "mean time of a question, from its start to its last answer"),
        Metric("rollout/requests", "requests", "mean number of generation requests a question"),
        Metric("rollout/broken_requests", "requests", "those that broke and were asked again", "0", "`generation.jsonl`: which server left or is sick"),
        Metric("rollout/lag_in_group", "steps", "newest less oldest weights among a question's answers"),
        Metric("rollout/in_flight", "questions", "being answered now", "above 0"),
        Metric("rollout/ready", "questions", "answered and waiting for training", "about a batch", "always 0: training waits, add servers; always at the limit: servers wait"),
        Metric("rollout/waiting", "questions", "given back, to be given out again", "near 0"),
        Metric("rollout/trained", "questions", "trained on since the run began"),
        Metric("rollout/filtered", "questions", "left out since the run began: equal scores, or no reward"),
        Metric("rollout/dropped", "questions", "too stale to train on, since the run began", "0"),
        Metric("rollout/returned", "questions", "lost or given up by a worker, since the run began", "near 0", "`realsys logs`: rollout workers that ended"),
        Metric("rollout/set_aside", "questions", "that got no reward, or could not be played, since the run began", "absent", "`record set aside` in the master's log, with the reason"),
        Metric("rollout/failed_tries", "episodes", "tries of episodes that failed since the last step, by agent, environment or machine; each was played again; only in steps that have some", "absent", "`episode failed` in the rollout workers' logs"),
        Metric("rollout/outage_tries", "episodes", "the same where generation servers, or a service, did not answer", "absent", "`episode failed` in the rollout workers' logs"),
        Metric("rollout/failed_share", "share", "of the last 200 episodes, or of two steps' if these are more, those that failed three times in a row, or by the policy's doing twice, without those of outages; only in steps with failed tries", "absent, or far below `schedule.failed_share`", "`episode failed` in the rollout workers' logs"),
        Metric("rollout/servers_at_version", "version", "oldest weights at any server", "at most one behind the step"),
    ),
    "Dynamic sampling of synchronous runs": (
        Metric("dynamic_sampling/asked", "questions", "asked in the step: its batch, filtered and given back", "one to three batches", "`kept` is small: harder or easier questions, a wider `schedule.success_range`"),
        Metric("dynamic_sampling/kept", "questions", "of these with a mean reward in `schedule.success_range`, given back or not", "above a third of `asked`", "as above"),
        Metric("dynamic_sampling/filtered_low", "questions", "left out, below the range: all answers wrong", "falls", "stays near `asked`: too hard, or the rule never says right"),
        Metric("dynamic_sampling/filtered_high", "questions", "left out, above the range: all answers right", "rises late in a run", "near `asked`: learned, take harder questions"),
        Metric("dynamic_sampling/returned", "questions", "given back: behind the batch's last, asked again in the next step", "below half of `asked`"),
        Metric("dynamic_sampling/rounds", "calls", "of the actor, until the batch was full", "1 to 4", "`schedule.max_gen_batches` limits the questions, not the rounds"),
        Metric("dynamic_sampling/unscored", "questions", "left out because they got no reward", "absent", "the rule's log"),
        Metric("dynamic_sampling/reward", "", "mean reward of all answers, filtered ones included", "rises", "as for `critic/score/mean`, which is of the batch alone"),
    ),
    "Curriculum of a mixture": (
        Metric("curriculum/share/<source>", "share", "questions of the step that are the source's", "follows `4p(1 − p)` of `curriculum/success/<source>`"),
        Metric("curriculum/success/<source>", "share", "correct answers to the source by which the step's questions were chosen: of its newest `task.curriculum_steps` steps; 0.5 before the first", "between 0 and 1", "at 0 for long: too hard, or its rule never says correct; at 1: learned"),
    ),
    "Evaluation": (
        Metric("eval/accuracy", "share", "greedy answers to held-out questions that the rule calls right (not there where an agent plays: `auto_eval`); of preference pairs, those whose chosen answer scores higher", "rises", "falls while `critic/score/mean` rises: overfitting, or a rule that is gamed", verl="`val-core/<source>/…/mean@N` is of sampled answers"),
        Metric("eval/accuracy/<source>", "share", "the same of one source of a mixture"),
        Metric("eval/mean_reward", "", "mean score of these answers"),
        Metric("eval/num_problems", "questions", "number of held-out questions"),
        Metric("eval/num_unscored", "questions", "of them, those without a score: the rule could not give one, or an environment was away; in no other figure; not there: none", "0", "the workers' logs say what the rule raised"),
        Metric("eval/num_problems/<source>", "questions", "of one source"),
        Metric("eval/response_length/mean", "tokens", "length of these answers"),
        Metric("eval/loss", "nats a token", "fine-tuning: loss on held-out answers; of preference pairs, mean loss of a held-out pair", "falls, then flat"),
        Metric("eval/perplexity", "", "its exponential"),
        Metric("eval/n_tokens", "tokens", "held-out answer tokens"),
        Metric("eval/margin", "", "of held-out preference pairs: as `dpo_train/margin` or `reward_train/margin`", "rises"),
        Metric("eval/chosen_reward", "", "as `dpo_train/chosen_reward`"),
        Metric("eval/rejected_reward", "", "as `dpo_train/rejected_reward`"),
        Metric("eval/chosen_logprob", "nats a token", "as `dpo_train/chosen_logprob`"),
        Metric("eval/rejected_logprob", "nats a token", "as `dpo_train/rejected_logprob`"),
        Metric("eval/kl_estimate", "nats an answer", "as `dpo_train/kl_estimate`, over held-out pairs"),
        Metric("eval/n_pairs", "pairs", "number of held-out preference pairs"),
        Metric("auto_eval/<figure>", "", "the same figures of saved checkpoints, and `pass@k`, of a benchmark with its name in front (evaluation.md); `success` in place of `accuracy` where an agent plays and no rule is named; in the report and TensorBoard"),
    ),
    "Supervised fine-tuning": (
        Metric("sft_train/loss", "nats a token", "next-token loss on answer tokens", "falls", "flat: the learning rate; falls while `eval/loss` rises: stop earlier", verl="`train/loss`"),
        Metric("sft_train/grad_norm", "", "as `actor/grad_norm`", "steady", verl="`train/grad_norm`"),
        Metric("sft_train/lr", "", "learning rate"),
        Metric("sft_train/skipped_steps", "steps", "as `actor/skipped_steps`: 1 in a step without an update", "absent"),
        Metric("sft_train/n_tokens", "tokens", "answer tokens of the step"),
        Metric("sft_train/n_sequences", "answers", "answers of the step"),
    ),
    "Preference pairs": (
        Metric("reward_train/loss", "", "mean loss of a pair: −log σ(margin), and the centering term", "falls from 0.69", "flat: the learning rate; falls while `eval/loss` rises: stop earlier"),
        Metric("reward_train/accuracy", "share", "pairs whose chosen answer scores higher", "rises from 0.5"),
        Metric("reward_train/margin", "", "mean score of chosen less rejected answers", "rises from 0"),
        Metric("reward_train/grad_norm", "", "as `actor/grad_norm`", "steady"),
        Metric("reward_train/lr", "", "learning rate"),
        Metric("reward_train/skipped_steps", "steps", "as `sft_train/skipped_steps`", "absent"),
        Metric("dpo_train/loss", "", "mean loss of a pair, by `loss` (preferences.md)", "falls; of dpo from 0.69, of kto from 0.5", "flat: the learning rate; falls while `eval/loss` rises: stop earlier"),
        Metric("dpo_train/accuracy", "share", "pairs whose chosen answer has the larger implicit reward; equal ones count half", "rises from 0.5"),
        Metric("dpo_train/margin", "", "mean implicit reward of chosen less rejected answers", "rises from 0", "far above 5: the pairs are learned by heart; fewer epochs, lower learning rate"),
        Metric("dpo_train/chosen_reward", "", "mean implicit reward of chosen answers: β · log π/π_ref, of ipo τ · log π/π_ref, of simpo β · log π a token", "near 0 or above", "far below 0: chosen answers become less likely too; a larger `loss.beta`, lower learning rate"),
        Metric("dpo_train/rejected_reward", "", "the same of rejected answers", "falls"),
        Metric("dpo_train/chosen_logprob", "nats a token", "mean over chosen answers of their mean log-prob a token", "steady, or rises", "as for `dpo_train/chosen_reward`"),
        Metric("dpo_train/rejected_logprob", "nats a token", "the same of rejected answers", "falls slowly"),
        Metric("dpo_train/kl_estimate", "nats an answer", "z₀ of kto: mean log π/π_ref of the step's answers before the update, at least 0", "small"),
        Metric("dpo_train/grad_norm", "", "as `actor/grad_norm`", "steady"),
        Metric("dpo_train/lr", "", "learning rate"),
        Metric("dpo_train/skipped_steps", "steps", "as `sft_train/skipped_steps`", "absent"),
    ),
    "Time and position": (
        Metric("time/step_s", "s", "the walk over the graph, without evaluations and checkpoints", verl="`timing_s/step` includes checkpoints"),
        Metric("time/publish_weights_s", "s", "training stood still for the copy of the weights", "a small share of `time/step_s`"),
        Metric("time/update_servers_s", "s", "until all servers had the newest weights"),
        Metric("time/servers_paused_s", "s", "servers stood still meanwhile"),
        Metric("time/<call>_weights_s", "s", "weight movements of a call's hooks, where it has some"),
        Metric("time/<call>_s", "s", "inside the interface, on the slowest worker", verl="`timing_s/gen`, `timing_s/update_actor`, … are the controller's waits, transfers included"),
        Metric("perf/idle/<pool>", "share", "of the step in which the pool's workers ran no request, mean over them", "low", "`realsys search`: another placement"),
        Metric("perf/compute_ratio", "", "sum of the calls' seconds over the step's; above 1 where calls overlapped", "near 1, or above", "below 0.8: transfers and waiting; `timeline.json`"),
        Metric("perf/tokens_per_s", "tokens a second", "tokens of the graph's first call over the step's seconds", verl="`perf/throughput` is per GPU, of all calls' tokens"),
        Metric("epoch", "", "of the data, from 0", verl="`training/epoch`"),
        Metric("step", "", "from 1; 0 is the evaluation before", verl="`training/global_step`"),
    ),
}
# fmt: on
METRICS = tuple(metric for group in GROUPS.values() for metric in group)

_WRITTEN = {metric.written: metric.name for metric in METRICS if metric.written}
_CALLS = {"actor_train/": "actor/", "critic_train/": "critic/"}


def current_name(written: str) -> str:
    """Returns the metric's name of ``<call>/<statistic>``; what the table doesn't know stays as it is."""
    if name := _WRITTEN.get(written):
        return name
    for call, short in _CALLS.items():
        if written.startswith(call):
            return short + written.removeprefix(call)
    return written


def with_current_names(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row of metrics under today's names, whatever revision wrote it."""
    return {current_name(key): value for key, value in row.items()}
