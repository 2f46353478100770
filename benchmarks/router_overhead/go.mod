module kvasir.dev/benchmarks/router_overhead

go 1.26.0
