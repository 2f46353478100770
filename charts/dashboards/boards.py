"""All dashboards of the chart, in the order in which one looks for the cause of trouble."""

from charts.dashboards.autoscaler import AUTOSCALER
from charts.dashboards.disaggregation import DISAGGREGATION
from charts.dashboards.engine import ENGINE
from charts.dashboards.kv_cache import KV_CACHE
from charts.dashboards.operator import OPERATOR
from charts.dashboards.overview import OVERVIEW
from charts.dashboards.router import ROUTER
from charts.dashboards.speculation import SPECULATION

BOARDS = (OVERVIEW, ENGINE, ROUTER, KV_CACHE, SPECULATION, DISAGGREGATION, AUTOSCALER, OPERATOR)
