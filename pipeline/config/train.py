"""States to head: its shape, and its training."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from pipeline.config.section import Place, Section, TreeSection

Loss = Literal["cross_entropy", "kl", "ce_tv"]
#: Weight of the total variation in `ce_tv`, beside the cross-entropy's.
TV_SHARE = 0.9
#: The loss where none is set; of all others cross-entropy.
_LOSSES: dict[str, Loss] = {"dspark": "ce_tv"}
#: AdamW's peak rate where none is set, for one head and for a chain of them. A block drafter starts
#: as a least-squares solution, which larger steps of AdamW destroy, and so do all but the first of
#: a chain. Muon's do not (docs/log.md): 1e-3 for all.
_LEARNING_RATES = {"eagle3": (1e-3, 3e-4), "dflash": (2e-4, 2e-4), "dspark": (2e-4, 2e-4)}
#: What an algorithm of one head is with several of them.
_CHAINS = {"eagle3": "mtp"}
#: Switches of training that only one EAGLE-3 head takes.
_OF_ONE_HEAD = ("dropout", "activation_checkpointing", "compile")


class HeadSection(Section):
    """Shape of the draft head."""

    draft_vocab_size: int = Field(4096, gt=0)
    """Target tokens the head can propose, the most frequent supervised ones."""
    intermediate_size: int | None = Field(None, gt=0)
    """Width of the head's MLP; None takes the target's."""
    num_attention_heads: int | None = Field(None, gt=0)
    """Query heads; None takes the target's."""
    num_key_value_heads: int | None = Field(None, gt=0)
    """Key/value heads; None takes the target's."""
    init_layer: Literal["least_squares", "target_last", "random"] = "least_squares"
    """least_squares solves fc, values and MLP output on the first batches, 30 labels for each of
    its 4 · hidden size regressors, beside random queries, keys and neurons; target_last copies the
    target's last layer where shapes fit."""
    init_lm_head: Literal["target", "random"] = "target"
    """Start lm_head from the target's rows of the draft vocabulary."""
    fc_norm: bool = False
    """RMS norm of each aux state before fc (EAGLE-3.1)."""
    norm_output: bool = False
    """The next step reads the normed output instead of the un-normed one (EAGLE-3.1)."""
    draft_window: int | None = Field(None, gt=0)
    """Recent positions that the head attends to, in training and in our decoder, in whole pages of
    64 beside the first page; None: all. Servers have windows without that page
    (docs/head-format.md)."""
    heads: int = Field(1, gt=0, le=8)
    """Chained heads, one a step, each with a layer and keys and values of its own (multi-token
    prediction); steps beyond reuse the last. 1: the EAGLE-3 head."""
    chain_input: Literal["aux", "final"] = "aux"
    """What the first of several heads reads: fc of the aux states, or the target's final state, as
    the MTP classes of SGLang and vLLM do; that needs target.capture_layers to end with the last
    layer."""
    max_share_of_target: float = Field(0.05, gt=0)
    """Refuse heads with more than this share of the target's parameters."""

    @model_validator(mode="after")
    def _is_one_kind(self) -> HeadSection:
        if self.heads == 1 and self.chain_input != "aux":
            raise ValueError("chain_input requires heads >= 2; set heads, or leave it out")
        for name in ("fc_norm", "norm_output", "draft_window"):
            if self.heads > 1 and getattr(self, name):
                raise ValueError(f"{name} requires heads: 1; leave it out, or set heads to 1")
        return self

    @model_validator(mode="after")
    def _solves_for_the_targets_output(self) -> HeadSection:
        if self.init_layer == "least_squares" and self.init_lm_head == "random":
            raise ValueError(
                "init_layer=least_squares solves for the target's lm_head; "
                "set init_lm_head to target, or init_layer to target_last"
            )
        return self

    def check_training(self, train: TrainSection) -> None:
        """Raise ValueError where such heads cannot be trained so."""
        if self.heads == 1:
            return
        if train.ttt_steps < self.heads:
            raise ValueError(
                f"ttt_steps is {train.ttt_steps}, too few to train {self.heads} heads; "
                "set it to one a head, or more"
            )
        _refuse_switches(train, "requires head_config.heads: 1")


class DflashSection(Section):
    """Shape and training of a block drafter (DFlash, arXiv:2602.06036)."""

    layers: int = Field(1, gt=0)
    """Layers, each with keys and values of its own for every token of the context."""
    block_size: int = Field(8, gt=1, le=16)
    """Tokens of a block, the last accepted one included: one forward predicts all others."""
    draft_vocab_size: int = Field(4096, gt=0)
    """Target tokens that can be proposed, the most frequent supervised ones."""
    target_lm_head: bool = False
    """Propose all of the target's tokens with its own output rows: the head trains and stores no
    lm_head, and draft_vocab_size and train_lm_head say nothing."""
    intermediate_size: int | None = Field(None, gt=0)
    """Width of a layer's MLP; None takes the target's."""
    num_attention_heads: int | None = Field(None, gt=0)
    """Query heads; None takes the target's."""
    num_key_value_heads: int | None = Field(None, gt=0)
    """Key/value heads; None takes the target's."""
    mask_token_id: int | None = Field(None, ge=0)
    """Target token whose embedding stands for a token to predict; None: the one that pads a text,
    or begins it."""
    init_layers: Literal["least_squares", "target_last", "random"] = "least_squares"
    """Start from as many of the target's last layers where shapes fit; least_squares then points
    the first layer's attention at the root and the context's end, and solves fc, values and output
    on the first batches."""
    anchors: int = Field(256, gt=0)
    """Supervised tokens of a micro-batch that a block is trained behind, drawn anew every time;
    all where there are fewer."""
    position_decay: float = Field(4.0, gt=0)
    """The loss at position k of a block weighs exp(-(k - 1) / position_decay)."""
    max_share_of_target: float = Field(0.05, gt=0)
    """Refuse heads with more than this share of the target's parameters."""

    @property
    def predicted(self) -> int:
        """Tokens that a block predicts."""
        return self.block_size - 1

    def check_training(self, train: TrainSection) -> None:
        """Raise ValueError where a block drafter cannot be trained so."""
        _refuse_switches(train, "is only supported with algorithm: eagle3")
        most = self.predicted
        if train.evaluate_every and train.evaluate_tree.steps > most:
            raise ValueError(
                f"evaluate_tree.steps is {train.evaluate_tree.steps}, a block of "
                f"{self.block_size} predicts {most} tokens; lower it"
            )


class DsparkSection(DflashSection):
    """Shape and training of a DSpark block drafter (arXiv:2607.05147)."""

    block_size: int = Field(7, gt=1, le=16)
    """Tokens of a block, the last accepted one included: every position predicts the token after
    it, so they are as many as one forward predicts."""
    markov_rank: int = Field(32, gt=0, le=4096)
    """Rank r of the bias that the token before a position gives its logits: r numbers for each of
    the target's tokens, and r for each that can be proposed."""
    confidence: bool = True
    """Train an output that says how much of a position's proposals will be accepted."""

    @property
    def predicted(self) -> int:
        return self.block_size


def _refuse_switches(train: TrainSection, reason: str) -> None:
    for name in _OF_ONE_HEAD:
        if getattr(train, name):
            raise ValueError(f"{name} {reason}; turn it off")


class TrainSection(Section):
    """Training of the head."""

    algorithm: str = "eagle3"
    """What is trained: an EAGLE-3 head or a chain of heads (eagle3: head_config, ttt_steps,
    step_decay), a block drafter (dflash, dspark), or what an installed package registers."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of an algorithm that another package registers; it documents them."""
    dflash: DflashSection = DflashSection()
    """The block drafter."""
    dspark: DsparkSection = DsparkSection()
    """The block drafter whose tokens depend on each other."""

    head_config: HeadSection = HeadSection()
    """Shape and initialisation of the head; `head` elsewhere names a head's directory."""
    ttt_steps: int = Field(5, gt=0)
    """Training-time-test steps K: the head is unrolled k = 0…K-1."""
    step_decay: float = Field(0.8, gt=0, le=1)
    """Loss weight of step k is step_decay**k."""
    start_from: Place | None = None
    """Head directory, or hub:org/name, to fine-tune; its draft vocabulary and shape are kept."""
    states: Place | None = None
    """Run whose states are trained on, where they are not in this one: several heads can share
    them. None: this run's."""
    loss: Loss = "cross_entropy"
    """Soft cross-entropy, KL divergence, or a tenth of the former and nine of total variation
    (ce_tv), on the draft vocabulary. Where none is given: cross_entropy, under algorithm dspark
    ce_tv."""
    teacher_temperature: float = Field(1.0, gt=0)
    """Temperature of the teacher's softmax; below 1 it nears the target's greedy choice."""
    train_lm_head: bool = True
    """False keeps lm_head as it started."""
    follow: bool = False
    """Train while features are made: on half of features.keep_shards at a time, epochs passes over
    each half before the next (docs/training.md); states that a checkpoint is past are deleted."""
    data_tokens: int | None = Field(None, gt=0)
    """Train on samples drawn with run.seed until they have so many tokens; None: on all."""
    epochs: int = Field(3, gt=0)
    """Passes over the states."""
    max_steps: int | None = Field(None, gt=0)
    """Stop after this many optimiser steps."""
    batch_tokens: int = Field(1024, gt=0)
    """Token budget of one packed micro-batch."""
    long_samples: Literal["split", "drop"] = "split"
    """Samples above batch_tokens: cut into parts that keep their positions and attend to all that
    came before, or dropped and counted."""
    accumulate: int = Field(1, gt=0)
    """Micro-batches per optimiser step and process."""
    learning_rate: float = Field(_LEARNING_RATES["eagle3"][0], gt=0)
    """Peak rate. Where none is given: 1e-3, but with AdamW 3e-4 of chained heads and 2e-4 under
    algorithms dflash and dspark."""
    warmup_share: float = Field(0.05, ge=0, lt=1)
    """Share of the steps with linear warm-up; a cosine to 5 % of the peak follows."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon steps the matrices of fc and layer, by updates of AdamW's size, and leaves the rest to
    AdamW; it needs zero_stage 0."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled decay."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of what the layer reads, normed embedding and hidden state, that is set to zero, drawn
    anew for each step of the unroll: data that is passed over often is less learned by heart."""
    alternative_weight: float = Field(1.0, ge=0)
    """Loss weight of alternatives, where the states have some (features.alternatives), over that of
    a label's first step; 0: they are not trained on. EAGLE-3 heads alone read them."""
    clip_norm: float = Field(0.5, gt=0)
    """Gradient norm limit."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type of products; weights, gradients and their sums are in float32. auto: as target.dtype,
    but training that continues from a checkpoint keeps the checkpoint's. The head is stored in
    bfloat16."""
    zero_stage: Literal[0, 1] = 0
    """DeepSpeed ZeRO stage; 1 splits AdamW's state over the processes."""
    activation_checkpointing: bool = False
    """Recompute a step's activations in the backward pass: less memory, more time."""
    compile: bool | None = None
    """torch.compile the head's layer; needs a compiler on CPU. None: on a GPU."""
    evaluate_every: int | None = Field(None, gt=0)
    """Optimiser steps between decoded evaluations; the latest checkpoint with a τ that no other
    surely beats is exported. None: the last."""
    evaluate_prompts: int = Field(64, gt=1)
    """Held-out samples that an evaluation decodes; as many others are decoded with the head that is
    exported and give the τ on its card. None of them is trained on."""
    evaluate_tokens: int = Field(48, gt=1)
    """Length limit of a decoded reply."""
    evaluate_tree: TreeSection = TreeSection(top_k=1, steps=4, nodes=5)
    """Draft tree of the evaluation; a shape, not auto."""
    checkpoint_every: int = Field(100, gt=0)
    """Optimiser steps between checkpoints."""
    keep_checkpoints: int = Field(2, gt=0)
    """Older checkpoints are deleted."""
    grace_seconds: float = Field(30, gt=0)
    """Time after a SIGTERM for the step under way and a checkpoint; then training ends without one.
    Not more than the scheduler's own (Kubernetes: terminationGracePeriodSeconds)."""
    timeout_minutes: float = Field(30, gt=0, le=1_000_000)
    """How long a process waits for the others of its group: more than one of them takes for an
    evaluation, or for a checkpoint's way to the store."""
    log_every: int = Field(10, gt=0)
    """Optimiser steps between lines of metrics.jsonl."""
    wandb: Literal["offline", "online", "disabled"] = "offline"
    """Weights & Biases mode."""
    wandb_project: str = "eagle3"
    """Weights & Biases project."""

    @model_validator(mode="before")
    @classmethod
    def _takes_the_algorithm_s_own_loss_and_rate(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        algorithm = str(value.get("algorithm", "eagle3"))
        if loss := _LOSSES.get(algorithm):
            value = {"loss": loss, **value}
        if "learning_rate" in value or value.get("optimizer") == "muon":
            return value
        rates = _LEARNING_RATES.get(algorithm)
        if rates is None:
            return value
        head = value.get("head_config")
        heads = head.get("heads", 1) if isinstance(head, dict) else getattr(head, "heads", 1)
        return {**value, "learning_rate": rates[heads not in (1, "1")]}

    @model_validator(mode="after")
    def _fits_the_algorithm(self) -> TrainSection:
        sections = {"dflash": self.dflash, "dspark": self.dspark}
        sections.get(self.algorithm, self.head_config).check_training(self)
        return self

    @model_validator(mode="after")
    def _steps_whole_matrices(self) -> TrainSection:
        if self.optimizer == "muon" and self.zero_stage:
            raise ValueError("muon needs whole matrices, which ZeRO cuts; set zero_stage to 0")
        return self

    @model_validator(mode="after")
    def _follows_to_the_end(self) -> TrainSection:
        if self.follow and self.max_steps:
            raise ValueError(
                "follow trains on all states, max_steps would leave some unread; "
                "leave it out, or set data_tokens"
            )
        if self.follow and self.states:
            raise ValueError("follow deletes the states that it has trained on; leave states out")
        return self

    @property
    def block(self) -> DflashSection:
        """That of the block drafter which is trained."""
        return {"dspark": self.dspark}.get(self.algorithm, self.dflash)

    @property
    def head_algorithm(self) -> str:
        """The algorithm by its name in the registry: several heads are a chain, `mtp`."""
        chain = _CHAINS.get(self.algorithm, self.algorithm)
        return chain if self.head_config.heads > 1 else self.algorithm
