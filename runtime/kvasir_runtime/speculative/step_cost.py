"""What steps cost with drafts and without, by batch size, and when it is time to find out again.

A step without drafts does no drafting work at all, so the difference is the whole cost of drafting: verifying,
guessing, and following the target. What prompts cost the proposer is counted apart (`PromptCost`), since steps with
prompts differ too much from each other to be compared, but where there are no others (`depth`).

Estimates only propose; an account decides. It charges every step that drafts, one that begins, ends or catches up too,
with all that it took, and credits the tokens that it brought; steps without drafts pay debts back slowly.
"""

from dataclasses import dataclass, field

from kvasir_runtime.scheduling.step import TimedStep

PROBE_STEPS = 3
"""Steps of one kind that are timed before their time is believed."""
MOST_PROBE_PLANS = 32
"""Steps after which a probe is given up, timed or not."""
PLAIN_INTERVAL = 128
"""Steps of a batch size after which one without drafts is timed again, where drafts pay."""
PROBE_SHARE = 0.005
"""Of the time without drafts, what trying them again may add to it in the long run."""
FEWEST_STEPS_BETWEEN_PROBES = 256
MOST_STEPS_TO_SECOND_PROBE = 1024
"""Whatever is owed, since the first probe may have met a busy machine; doubled at each that fails."""
MOST_LOST = 8.0
"""In plain steps: drafts that were to pay are left once they have lost so much."""
MOST_SAVED = 32.0
"""In plain steps, of what drafts have gained: what they may lose again before anything is owed."""
MOST_CHARGED = 8.0
"""Plain steps: of one that drafts, before it is known what such steps take: the first may wait for a capture."""
SMOOTHING = 0.1
FASTER, SLOWER = 0.25, 0.06
"""Weights of a step that took less, or more, than the running mean: what else the machine does only makes steps slower,
and a plain step believed too slow would make drafts look free."""
RECENT = 0.2
"""Weight of the last plain step in what such steps take just now."""
DEPTH_WEIGHT = 0.03
"""Of a step in what another draft is seen to take."""
SUPPOSED_SPREAD = 0.05
"""Drafts squared: as if depths had spread so much, with drafting at all as dear as a draft."""
KEPT_OF_LOAD = 0.99
"""Of what is known of the load, at each step."""


@dataclass(slots=True)
class StepSeconds:
    """A running mean that leans on the faster steps, and that one slow step does not carry away."""

    mean: float = 0.0
    num_samples: int = 0
    steps_since: int = 0

    @property
    def is_known(self) -> bool:
        return self.num_samples >= PROBE_STEPS

    def add(self, seconds: float) -> float:
        """The weight that the step got."""
        self.num_samples += 1
        self.steps_since = 0
        is_faster = self.num_samples == 1 or seconds < self.mean
        if self.num_samples <= PROBE_STEPS:  # the first steps of a kind may warm up: the fastest counts
            weight = float(is_faster)
        else:
            weight = FASTER if is_faster else SLOWER
        self.mean += weight * ((seconds if weight == 1.0 else min(seconds, 2 * self.mean)) - self.mean)
        return weight


@dataclass(slots=True)
class DepthSlope:
    """What steps take by the drafts a request in them, later steps counting more."""

    _num_samples: int = 0
    _mean_depth: float = 0.0
    _mean_seconds: float = 0.0
    _spread: float = 0.0
    _joint_spread: float = 0.0

    def add(self, depth: float, seconds: float) -> None:
        self._num_samples += 1
        weight = max(DEPTH_WEIGHT, 1 / self._num_samples)
        deeper, slower = depth - self._mean_depth, seconds - self._mean_seconds
        self._mean_depth += weight * deeper
        self._mean_seconds += weight * slower
        self._spread = (1 - weight) * (self._spread + weight * deeper * deeper)
        self._joint_spread = (1 - weight) * (self._joint_spread + weight * deeper * slower)

    def seconds_a_draft(self, depth: float, all_seconds: float) -> float:
        """Of the `all_seconds` that `depth` drafts a request add to a step, what each of them does: none of it, where
        deeper steps took no longer, up to its share of all."""
        supposed = all_seconds / (1 + depth)
        seen = (self._joint_spread + SUPPOSED_SPREAD * supposed) / (self._spread + SUPPOSED_SPREAD)
        return min(max(seen, 0.0), all_seconds / depth)


@dataclass(slots=True)
class BatchCost:
    """Of one batch size: what its steps of decodes take, and whether drafts are being tried."""

    believed_ratio: float | None = None
    """Of the cost of a draft to that of a plain step, until it is measured: another batch size's; None: unknown."""
    owed: float = 0.0
    """In plain steps: what drafting has cost beyond what it brought; less than 0: what it gained, up to MOST_SAVED."""
    probe_cost: float = 0.0
    """In plain steps: of the probe under way, or the last one."""
    has_probed: bool = False
    """Whether a probe has ended since drafts were chosen last."""
    plain: StepSeconds = field(default_factory=StepSeconds)
    drafted: StepSeconds = field(default_factory=StepSeconds)
    _probe_steps_left: int = 0
    """To be timed."""
    _probe_plans_left: int = 0
    """Steps that may be planned for it: those with prompts cannot be timed."""
    _mean_depth: float = 1.0
    _slope: DepthSlope = field(default_factory=DepthSlope)
    _num_probes: int = 0
    """Since drafts have paid off."""
    _steps_since_probe: int = 0
    _most_owed: float = MOST_LOST
    """Where drafts are left again."""
    _recent_plain: float = 0.0

    @property
    def draft_seconds(self) -> float | None:
        """Of one more draft a request; None: nothing is known."""
        if self.drafted.num_samples:
            return self._slope.seconds_a_draft(self._mean_depth, self._all_seconds)
        return None if self.believed_ratio is None else self.believed_ratio * self.plain.mean

    @property
    def fixed_seconds(self) -> float:
        """Of drafting at all (looking up, following the target), which is supposed to take as long as a draft until
        steps of several depths have been seen."""
        each = self.draft_seconds or 0.0
        return self._all_seconds - each * self._mean_depth if self.drafted.num_samples else each

    @property
    def _all_seconds(self) -> float:
        return max(self.drafted.mean - self.plain.mean, 0.0)

    @property
    def ratio(self) -> float | None:
        """Of the cost of a draft to that of a plain step; None: not measured here."""
        if not (self.drafted.num_samples and self.plain.num_samples):
            return None
        return self._all_seconds / (1 + self._mean_depth) / self.plain.mean

    def of_another_size(self) -> "BatchCost":
        """What to believe of a batch size that has shown nothing yet: that a probe costs as much there."""
        ratio = self.believed_ratio if self.ratio is None else self.ratio
        return BatchCost(ratio, owed=self.probe_cost, probe_cost=self.probe_cost)

    @property
    def is_probe_due(self) -> bool:
        """Whether trying drafts again keeps within PROBE_SHARE."""
        if self.draft_seconds is None and not self._num_probes:
            return True
        longest = MOST_STEPS_TO_SECOND_PROBE << max(0, self._num_probes - 1)
        return self._steps_since_probe >= (FEWEST_STEPS_BETWEEN_PROBES if self.owed <= 0 else longest)

    def may_draft(self, *, drafts_pay: bool) -> bool:
        """Whether drafts that promise to pay are trusted to: until they have lost too much, then once that is paid back
        or a probe has shown otherwise."""
        return self.owed <= self._most_owed if drafts_pay else self.has_probed or self.owed <= 0

    @property
    def is_probing(self) -> bool:
        return self._probe_steps_left > 0 and self._probe_plans_left > 0

    def needs_plain(self, *, drafts_pay: bool) -> bool:
        """Whether steps without drafts are to be timed (again)."""
        if drafts_pay and self.plain.steps_since >= PLAIN_INTERVAL:
            self.plain = StepSeconds(self.plain.mean)
        return not self.plain.is_known

    def begin_probe(self) -> None:
        self.believed_ratio = self.believed_ratio if self.ratio is None else self.ratio
        self.drafted = StepSeconds()
        self._probe_steps_left, self._probe_plans_left = PROBE_STEPS, MOST_PROBE_PLANS
        self._num_probes += 1
        self._steps_since_probe = 0
        self.probe_cost = 0.0

    def note_probe_planned(self) -> None:
        self._probe_plans_left -= 1

    def note_choice(self, *, drafts_paid: bool, drafts_pay: bool) -> None:
        self.has_probed = False
        if drafts_pay and self.owed <= 0:
            self._num_probes = 0
        if drafts_pay and not drafts_paid:
            self._most_owed = max(self.owed, 0.0) + MOST_LOST
        if drafts_paid and not drafts_pay:
            self._steps_since_probe = 0

    def observe(self, step: TimedStep, prompt_seconds: float = 0.0) -> None:
        """A step of decodes alone; where it drafts it has to bring in `prompt_seconds` too."""
        self._steps_since_probe += not self.is_probing
        self.plain.steps_since += 1
        if step.num_asked or step.num_proposals:
            self._charge(step, prompt_seconds)
        else:
            self._add_plain(step.seconds)
        if step.num_asked and step.num_proposals and not step.is_catching_up:
            self._time_drafted(step.num_asked / step.num_decodes, step.seconds)

    def _add_plain(self, seconds: float) -> None:
        self.plain.add(seconds)
        recent = min(seconds, 4 * self.plain.mean)
        self._recent_plain += RECENT * (recent - self._recent_plain) if self._recent_plain else recent
        if self.owed > 0:
            self.owed = max(self.owed - PROBE_SHARE, 0.0)

    def _charge(self, step: TimedStep, prompt_seconds: float) -> None:
        if not self._recent_plain:
            return
        most = 2 * self.drafted.mean if self.drafted.is_known else MOST_CHARGED * self._recent_plain
        seconds = step.seconds if step.is_catching_up else min(step.seconds, most)
        brought = 1 + step.num_accepted / step.num_decodes
        cost = (seconds + prompt_seconds) / self._recent_plain - brought
        self.owed = max(self.owed + cost, -MOST_SAVED)
        if self.is_probing:
            self.probe_cost = max(self.probe_cost + cost, 0.0)

    def _time_drafted(self, depth: float, seconds: float) -> None:
        """`depth` drafts a request on average. A probe is compared with the steps just before it, which whatever else
        keeps the machine busy has slowed down alike."""
        if self.is_probing:
            seconds *= self.plain.mean / max(self.plain.mean, self._recent_plain)
            self._probe_steps_left -= 1
            self.has_probed = not self._probe_steps_left
        weight = self.drafted.add(seconds)
        self._mean_depth += weight * (depth - self._mean_depth)
        self._slope.add(depth, min(seconds, 2 * self.drafted.mean))


@dataclass(slots=True)
class PromptCost:
    """What a proposer spends on prompts, spread over the steps that decode: drafts have to bring that in as well."""

    _seconds: float = 0.0
    _tokens: float = 0.0
    """Of prompts that the proposer ran through in `_seconds`."""
    _load_tokens: float = 0.0
    """Of prompts, fading with each step that decodes: each of these bears 1 - KEPT_OF_LOAD of them."""
    _decode_seconds: float = 0.0
    """That the proposer takes after a step without prompts."""

    @property
    def seconds_a_step(self) -> float:
        return self._seconds / self._tokens * self._load_tokens * (1 - KEPT_OF_LOAD) if self._tokens else 0.0

    def observe(self, step: TimedStep) -> None:
        self._load_tokens = self._load_tokens * (KEPT_OF_LOAD if step.num_decodes else 1.0) + step.num_prompt_tokens
        if not step.num_proposals:
            return
        if not step.num_prompt_tokens:
            weight = SMOOTHING if self._decode_seconds else 1.0
            self._decode_seconds += weight * (step.proposer_seconds - self._decode_seconds)
        else:
            self._seconds = KEPT_OF_LOAD * self._seconds + max(step.proposer_seconds - self._decode_seconds, 0.0)
            self._tokens = KEPT_OF_LOAD * self._tokens + step.num_prompt_tokens
