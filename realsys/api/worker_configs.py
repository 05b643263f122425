"""Configuration of each kind of worker: the parts of an experiment's configuration (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from realsys.api.data import MicroBatchSpec
from realsys.api.dataflow import MFCDef
from realsys.api.model import (
    DatasetAbstraction,
    GenerationHyperparameters,
    ModelAbstraction,
    ModelBackendAbstraction,
    ModelName,
    ModelShardID,
)
from realsys.api.options import option, range_problems


@dataclass(frozen=True, kw_only=True)
class ExperimentSaveEvalControl:
    """Training length, and when to save, checkpoint and evaluate.

    ``save`` writes Hugging Face folders to keep, ``ckpt`` what a resume needs. Each happens when any
    of its three periods has passed; None switches a period off.
    """

    total_train_epochs: int = option(1, "passes over the data set", ge=1)
    benchmark_steps: int | None = option(None, "stop after so many steps; none: by epochs", ge=1)
    save_freq_epochs: int | None = option(None, "save every … epochs", ge=1)
    save_freq_steps: int | None = option(None, "save every … steps", ge=1)
    save_freq_secs: float | None = option(None, "save every …", unit="seconds", gt=0)
    ckpt_freq_epochs: int | None = option(None, "checkpoint every … epochs", ge=1)
    ckpt_freq_steps: int | None = option(None, "checkpoint every … steps", ge=1)
    ckpt_freq_secs: float | None = option(60.0, "checkpoint every …", unit="seconds", gt=0)
    ckpt_keep: int = option(2, "recovery checkpoints kept", ge=1)
    eval_freq_epochs: int | None = option(None, "evaluate every … epochs", ge=1)
    eval_freq_steps: int | None = option(None, "evaluate every … steps", ge=1)
    eval_freq_secs: float | None = option(None, "evaluate every …", unit="seconds", gt=0)


@dataclass(frozen=True, kw_only=True)
class WorkerInformation:
    """Identity of a worker and the keys that it watches.

    Attributes:
        worker_tag: ``training`` or ``evaluation``.
        host_key: name-resolution key that this worker keeps alive with its lease.
        watch_keys: the worker exits when all of these keys have disappeared.
    """

    experiment_name: str = ""
    trial_name: str = ""
    worker_type: str = ""
    worker_index: int = -1
    worker_count: int = 0
    worker_tag: str = "training"
    host_key: str | None = None
    watch_keys: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Worker name, such as ``model_worker/3``."""
        return f"{self.worker_type}/{self.worker_index}"


@dataclass(frozen=True, kw_only=True)
class ModelShard:
    """A shard on a model worker: which part, how its module is made, which backend wraps it."""

    id: ModelShardID
    model: ModelAbstraction
    backend: ModelBackendAbstraction
    eval_dataset: DatasetAbstraction | None = None
    eval_bs: int = 128


@dataclass(frozen=True, kw_only=True)
class ModelWorker:
    """A process that holds model shards and, where a source call runs, the data set.

    The fields under "resolved" are filled in by ``ExperimentConfig.resolve_worker_config``.
    """

    base_seed: int = 1
    shards: tuple[ModelShard, ...] = ()
    tokenizer_name_or_path: str | None = None
    datasets: tuple[DatasetAbstraction, ...] = ()
    shuffle_dataset: bool = True
    num_threads: int | None = None
    # resolved
    model_rpcs: tuple[MFCDef, ...] = ()
    msid2mwid: tuple[tuple[ModelShardID, int], ...] = ()
    instantiate: tuple[ModelName, ...] = ()
    worker_info: WorkerInformation = field(default_factory=WorkerInformation)


@dataclass(frozen=True, kw_only=True)
class GenerationServer:
    """A process that serves generation requests."""

    base_seed: int = 1
    backend_type: str = "embedded"
    backend_args: Mapping[str, Any] = field(default_factory=dict)
    model_path: str = ""
    tp_size: int = 1
    worker_info: WorkerInformation = field(default_factory=WorkerInformation)


FAILED_SHARE, FAILED_WINDOW = 0.1, 200  # most failed episodes, of the last so many

SCHEDULE_POLICIES = ("round_robin", "least_requests", "least_tokens", "sticky")

UPDATE_MODES = ("all_at_once", "rolling")


@dataclass(frozen=True, kw_only=True)
class GserverManager:
    """The process that routes rollouts to generation servers and updates their weights.

    Attributes:
        max_head_offpolicyness, train_batch_size, max_concurrent_rollouts: values of the run, for readers
            of the plan only; the master decides what is generated (``RolloutControl``).
        schedule_policy: one of ``SCHEDULE_POLICIES``; ``sticky`` keeps a group on one server.
        flush_request_timeout: time limit for one server's weight update, in seconds.
        update_mode: one of ``UPDATE_MODES``; ``rolling`` updates ``update_share`` of the servers at a time,
            which get no new requests meanwhile.
        server_limit: maximum number of requests at one server; 0: twice the number that it runs at once.
        routes: rollout worker → the servers that it may use; a worker without an entry may use all.
        sick_after: consecutive failed requests after which a server is quarantined.
        check_every_s: interval between health checks of a server, in seconds.
    """

    model_name: ModelName
    n_servers: int
    schedule_policy: str = option(
        "round_robin", "how a server is chosen", choices=SCHEDULE_POLICIES
    )
    max_head_offpolicyness: int = 0
    train_batch_size: int = 1
    flush_request_timeout: float = option(120.0, "for new weights", unit="seconds", gt=0)
    max_concurrent_rollouts: int = 1
    update_mode: str = option("all_at_once", "which servers at a time", choices=UPDATE_MODES)
    update_share: float = option(0.25, "of the servers at a time", gt=0, le=1)
    server_limit: int = option(0, "requests of one server", ge=0)
    routes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    sick_after: int = option(3, "requests that break in a row", ge=1)
    check_every_s: float = option(5.0, "between two checks", unit="seconds", gt=0)
    worker_info: WorkerInformation = field(default_factory=WorkerInformation)

    def __post_init__(self) -> None:
        for problem in range_problems(self, path="gserver_manager."):
            raise problem


@dataclass(frozen=True, kw_only=True)
class RolloutWorker:
    """A process that runs agents in environments.

    Attributes:
        tokenizer_path: Hugging Face directory of the policy: tokenizer and tokens that end an answer.
        new_tokens_per_chunk: maximum number of new tokens per request; None: one request per answer,
            several for long ones (``AnswerSettings``).
        rollout_request_timeout: longest silence of an answer in seconds: time in which it gets no token,
            over all its requests and retries, but for its time in the line of healthy servers. A healthy
            server may use all of it; an unhealthy one is abandoned after half of the remainder.
        env, agent: registered names, made with ``env_args`` and ``agent_args``.
        gconfig: sampling settings of each answer; ``n`` is ``group_size``.
        kept_sets: record which tokens each was sampled from; log-probs are over these.
        max_concurrent_rollouts: maximum number of prompts in progress.
        success_rate_lb, success_rate_ub: groups with a mean reward outside are not trained on (0.01 and
            0.99 drop groups that are all wrong or all right); None: no bound.
        dump_texts: number of groups per weight version whose texts are written to ``rollouts``.
        dump: keep the tensors of all delivered trajectories, for a replay.
        dump_limit_gib: size limit of this worker's dump over all attempts; later data is not kept.
            None: no limit.
    """

    base_seed: int = 1
    model_name: ModelName = ModelName("actor")
    tokenizer_path: str = ""
    new_tokens_per_chunk: int | None = option(None, "most new tokens a request", ge=1)
    rollout_request_timeout: float = option(
        300.0, "without a new token of an answer", unit="seconds", gt=0
    )
    env: str = ""
    env_args: Mapping[str, Any] = field(default_factory=dict)
    agent: str = ""
    agent_args: Mapping[str, Any] = field(default_factory=dict)
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    kept_sets: bool = False
    group_size: int = option(1, "answers a prompt", ge=1)
    max_concurrent_rollouts: int = option(16, "prompts at a time", ge=1)
    success_rate_lb: float | None = None
    success_rate_ub: float | None = None
    dump_texts: int = option(2, "groups a version whose texts are kept", ge=0)
    dump: bool = False
    dump_limit_gib: float | None = option(None, "largest dump of a run", unit="GiB", gt=0)
    datasets: tuple[DatasetAbstraction, ...] = ()
    worker_info: WorkerInformation = field(default_factory=WorkerInformation)

    def __post_init__(self) -> None:
        for problem in range_problems(self, path="rollout_worker."):
            raise problem


@dataclass(frozen=True, kw_only=True)
class MakerRoute:
    """Processes, receivers and weight sources of one rollout group of a detached run.

    Attributes:
        rollout_workers, servers: indices of its processes; it uses no other servers.
        holders: model workers to which it sends experience.
        sources: model workers from which its servers fetch weights.
        tickets: maximum number of prompts for each of its rollout workers over the whole run; None:
            no limit.
    """

    name: str
    rollout_workers: tuple[int, ...]
    servers: tuple[int, ...]
    holders: tuple[int, ...]
    sources: tuple[int, ...]
    tickets: int | None = None


DELIVERY_SILENCE_S = 4 * 3600.0


@dataclass(frozen=True, kw_only=True)
class RolloutControl:
    """How the master dispatches prompts, and how stale samples may be when trained on.

    Attributes:
        model_name: the model whose weights the generation servers use.
        max_staleness: maximum number of steps between the weights of a sample's oldest token and the
            weights that it trains.
        policy: ``wait``: batches in the order of the data; ``window``: in order of completion, unless
            that would make another sample too stale; ``drop``: in order of completion, and samples
            that became too stale are generated again.
        max_in_flight: maximum number of dispatched prompts; None: as many as the staleness allows.
        weights_through: ``stream`` (from process to process) or ``disk``.
        wire_dtype: dtype of streamed weights; empty: the model's compute dtype.
        delta: stream only what changed since the previous version if that is small.
        update_steps: servers are updated every this many versions.
        makers: rollout groups of a detached run; empty: every rollout worker uses every server.
        buffer_limit: maximum number of prompts queued for one model worker, those in progress included.
        trains: False: no model is trained; the servers keep their initial weights and no answer is too
            stale.
        silence_s: time without any delivery after which a step that waits for its batch ends the run.
        failed_share: most of the last FAILED_WINDOW episodes that may fail although they were played again.
    """

    model_name: ModelName = ModelName("actor")
    max_staleness: int = 0
    policy: str = "wait"
    max_in_flight: int | None = None
    weights_through: str = "stream"
    wire_dtype: str = ""
    delta: bool = False
    update_steps: int = 1
    makers: tuple[MakerRoute, ...] = ()
    buffer_limit: int | None = None
    trains: bool = True
    silence_s: float = option(
        DELIVERY_SILENCE_S, "without any delivery of an answer", unit="seconds", gt=0
    )
    failed_share: float = FAILED_SHARE


@dataclass(frozen=True, kw_only=True)
class CurriculumControl:
    """How often the sources of a mixture come, by how often answers to them are right.

    Attributes:
        weights: source → its weight where success rates are equal; 1 for those without.
        floor: least factor of a weight, of a source that is always right or always wrong; half right has 1.
        steps: number of a source's newest steps with answers that its success rate is of.
    """

    weights: Mapping[str, float]
    floor: float
    steps: int


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingControl:
    """Which questions a synchronous step trains on, by the mean reward of their answers.

    Attributes:
        lowest, highest: the range of mean rewards, bounds included.
        max_gen_batches: a step asks at most so many times its batch.
    """

    lowest: float
    highest: float
    max_gen_batches: int


@dataclass(frozen=True, kw_only=True)
class MasterWorker:
    """The process that executes the dataflow graph."""

    base_seed: int = 1
    exp_ctrl: ExperimentSaveEvalControl = field(default_factory=ExperimentSaveEvalControl)
    n_model_workers: int = 1
    shuffle_dataset: bool = True
    max_staleness: int = 0
    rollout: RolloutControl | None = None
    replay: str | None = None
    curriculum: CurriculumControl | None = None
    dynamic_sampling: DynamicSamplingControl | None = None
    # resolved
    model_rpcs: tuple[MFCDef, ...] = ()
    msid2mwid: tuple[tuple[ModelShardID, int], ...] = ()
    worker_info: WorkerInformation = field(default_factory=WorkerInformation)


HELD_OUT = "held_out"  # the benchmark of the task's own questions; its figures have no prefix


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Questions that saved checkpoints are evaluated on.

    Attributes:
        reward: registered rule; an answer that it scores above 0.5 is correct.
        n: answers per question for pass@1 … pass@n, sampled; 1: none.
        player: agent and environment that turn a question into an episode, as a rollout worker has them; an
            episode with a reward above 0.5 is correct. None: the policy's answer to the question is scored.
    """

    dataset: DatasetAbstraction
    reward: str = "math_verify"
    reward_args: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    player: RolloutWorker | None = None


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """The process that evaluates saved checkpoints of one role, one by one, while training goes on.

    Attributes:
        base_seed: seed of the data sets and of sampled answers.
        role: trained role whose checkpoints are evaluated.
        dtype: torch name of the dtype in which weights are loaded.
        benchmarks: by name, which prefixes each figure; ``HELD_OUT`` does not.
        gconfig: sampling settings of the answers; accuracy is measured on greedy ones.
        mb_spec: its token limits bound how many answers are decoded together, as in training.
        max_tries: attempts per checkpoint, after which it is recorded as failed and the run goes on.
    """

    base_seed: int = 1
    role: str = "actor"
    dtype: str = "float32"
    benchmarks: Mapping[str, Benchmark] = field(default_factory=dict)
    gconfig: GenerationHyperparameters = field(
        default_factory=lambda: GenerationHyperparameters(greedy=True)
    )
    batch_size: int = option(128, "questions at a time", ge=1)
    mb_spec: MicroBatchSpec = field(default_factory=MicroBatchSpec)
    num_threads: int | None = None
    poll_s: float = option(2.0, "between two looks for a checkpoint", unit="seconds", gt=0)
    max_tries: int = option(3, "of a checkpoint", ge=1)
    retry_s: float = option(30.0, "before it is tried again", unit="seconds", ge=0)
    worker_info: WorkerInformation = field(default_factory=WorkerInformation)

    def __post_init__(self) -> None:
        for problem in range_problems(self, path="evaluator."):
            raise problem


@dataclass(frozen=True, kw_only=True)
class RewardWorker:
    """A process that scores answers for the workers that sample or evaluate them.

    Attributes:
        reward, reward_args: registered rules with their arguments, as of the calls that it scores for.
    """

    reward: str
    reward_args: Mapping[str, Any] = field(default_factory=dict)
    worker_info: WorkerInformation = field(default_factory=WorkerInformation)
