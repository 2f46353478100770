"""The operator: whether one leads, keeps up, and gets its requests answered."""

from charts.dashboards.board import Board, Section
from charts.dashboards.panels import COUNT, EVENTS_PER_SECOND, PER_SECOND, SECONDS, Limits, Query, graph, number
from charts.dashboards.promql import OPERATORS
from charts.dashboards.variables import OPERATORS as CHOICES

_PASSES, _DURATION = "kvasir_operator_reconcile_total", "kvasir_operator_reconcile_duration_seconds"
_ERRORS, _REQUESTS = "kvasir_operator_reconcile_errors_total", "kvasir_operator_api_requests_total"
_READY = OPERATORS.max("kvasir_operator_service_ready", "service_namespace, inference_service")

_NUMBERS = Section(
    "Now",
    [
        number(
            "Leaders", COUNT,
            "One in each release. 0 for 2 minutes: KvasirOperatorWithoutLeader fires, services serve on and nothing "
            "is changed. The log says who holds the Lease.",
            OPERATORS.sum("kvasir_operator_leader"), Limits(1, 1, is_floor=True),
        ),
        number(
            "Operators", COUNT, "Pods that are scraped, those that stand by among them.",
            f"count({OPERATORS.of('kvasir_operator_leader')})",
        ),
        number(
            "Services due", COUNT,
            "Services that wait for a worker. Lasting: the API server answers slowly, see Time of a pass; or raise "
            "operator.workers.",
            OPERATORS.sum("kvasir_operator_queue_depth"), Limits(10, 50),
        ),
        number(
            "Failed passes", PER_SECOND,
            "A second. For 15 minutes: KvasirReconcileFailing fires. Errors below says with what.",
            OPERATORS.rate(_PASSES, "", 'result="error"'), Limits(0.01, 0.1), when_empty="none so far",
        ),
        number(
            "Time of a pass, p99", SECONDS,
            "Above some seconds the API server is slow, or throttles (API priority and fairness).",
            OPERATORS.quantile(0.99, _DURATION), Limits(2.5, 10), when_empty="no passes",
        ),
        number(
            "Services", COUNT, "That are not suspended.", f"count({_READY})", when_empty="no services",
        ),
    ],
)  # fmt: skip

_PASS = Section(
    "Passes",
    [
        graph(
            "Passes", PER_SECOND,
            "By result. Many without changes in the cluster: something writes to children again and again.",
            Query(OPERATORS.rate(_PASSES, "result"), "{{result}}"), is_stacked=True,
        ),
        graph(
            "Time of a pass", SECONDS, "From taking a service out of the queue to its status.",
            Query(OPERATORS.quantile(0.5, _DURATION), "p50"),
            Query(OPERATORS.quantile(0.9, _DURATION), "p90"),
            Query(OPERATORS.quantile(0.99, _DURATION), "p99"), when_empty="no passes",
        ),
        graph(
            "Queue", COUNT, "Services that are due and wait for a worker, by pod. Only the leader has any.",
            Query(OPERATORS.max("kvasir_operator_queue_depth", "pod"), "{{pod}}"),
        ),
        graph(
            "Longest wait", SECONDS,
            "Of the oldest service that waits for a worker, or the oldest pass that runs. At 300 s the operator is "
            "restarted.",
            Query(OPERATORS.max("kvasir_operator_queue_longest_wait_seconds", "pod"), "{{pod}}"),
        ),
        graph(
            "Errors", PER_SECOND,
            "Failed passes by error. ChildrenRefusedError, KubeForbiddenError: a quota, a policy or a missing right. "
            "KubeUnavailableError: the API server. charts/kvasir/RUNBOOKS.md, KvasirReconcileFailing, has more.",
            Query(OPERATORS.rate(_ERRORS, "error"), "{{error}}"), is_stacked=True, when_empty="none so far",
        ),
        graph(
            "Requests", EVENTS_PER_SECOND,
            "To the API server, by verb and kind. Steady writes without changes: two managers contest a field; Events "
            "of the service name it.",
            Query(OPERATORS.rate(_REQUESTS, "verb, kind", 'result="success"'), "{{verb}} {{kind}}"),
            Query(
                OPERATORS.rate(_REQUESTS, "verb, kind, result", 'result!="success"'), "{{verb}} {{kind}}: {{result}}"
            ), is_stacked=True,
        ),
        graph(
            "Leader", COUNT,
            "1 where a pod leads. It moves with every rollout of the operator; else look at the pod's restarts.",
            Query(OPERATORS.max("kvasir_operator_leader", "pod"), "{{pod}}"), highest=1,
        ),
    ],
)  # fmt: skip

_SERVICES = Section(
    "Services",
    [
        graph(
            "Ready", COUNT, "1 where a service is Ready. `kubectl describe kvsvc NAME` has the reason where it is not.",
            Query(_READY, "{{service_namespace}}/{{inference_service}}"), highest=1,
        ),
        graph(
            "Roles held by the autoscaler", COUNT,
            "1 where a role stays as it is for want of metrics: see the Autoscaler dashboard.",
            Query(
                OPERATORS.max("kvasir_operator_autoscaling_held", "service_namespace, inference_service, role"),
                "{{service_namespace}}/{{inference_service}} {{role}}",
            ), highest=1, when_empty="no service with autoscaling",
        ),
    ],
)  # fmt: skip

OPERATOR = Board(
    "operator", "Operator", "Whether an operator leads, keeps up, and gets its requests answered.",
    CHOICES, [_NUMBERS, _PASS, _SERVICES],
)  # fmt: skip
