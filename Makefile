# Everything that a person or CI does with this repository. `make` alone lists it.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
# Where `make test` writes what the tests said.
RESULTS := dist/tests
# How long each fuzz target runs.
FUZZTIME ?= 20s

TOOLCHAIN := go run ./integration/toolchain
# What the tests and the demo run against; the rest of the toolchain is built by the targets that need it.
PEERS := containerd ctr containerd-shim-runc-v2 crictl
# What mode crio is tested with besides.
KUBERNETES := kubelet kube-apiserver etcd

# What the compatibility matrix runs besides, of older versions.
OLDER := kubelet-1.34 kubelet-1.35 kubelet-1.36 containerd-older shim-older

# As root a test that can't run fails instead of being skipped: a kind of tests that never runs is no test.
ifeq ($(shell id -u),0)
export CLEAVE_REQUIRE_ROOT_TESTS ?= 1
endif

.PHONY: help
help: ## List the targets
	@echo "cleave: what make can do (root and a Debian machine with Go, make and ca-certificates are enough; the rest is fetched or built)"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | while IFS=$$'\t' read -r name what; do printf '  %-18s %s\n' "$$name" "$$what"; done

.PHONY: build
build: ## Build bin/cleave
	CGO_ENABLED=0 go build -trimpath -ldflags "-s -w -X main.version=$(VERSION)" -o bin/cleave ./cmd/cleave
	@echo "built bin/cleave $(VERSION)"

# A version as deb and rpm take one: from a tag, or 0.0.0 with the commit.
PACKAGE_VERSION ?= $(shell git describe --tags --match 'v[0-9]*' 2>/dev/null | sed 's/^v//; s/-\([0-9]*\)-g/+\1.g/; s/-/~/' | grep . || echo "0.0.0~$$(git rev-parse --short HEAD 2>/dev/null || echo unknown)")

# For what machines, and of which kinds.
ARCHITECTURES ?= amd64 arm64
KINDS ?= deb rpm

.PHONY: packages
packages: ## deb and rpm for linux/amd64 and arm64, in dist/packages
	@nfpm="$$($(TOOLCHAIN) get nfpm)"; \
	rm -rf dist/packages; mkdir -p dist/packages/pages; \
	go run -tags pages ./cmd/cleave pages dist/packages/pages; \
	gzip -9n dist/packages/pages/man/*.8; \
	for arch in $(ARCHITECTURES); do \
	  CGO_ENABLED=0 GOOS=linux GOARCH=$$arch go build -trimpath -ldflags "-s -w -X main.version=$(VERSION)" -o dist/packages/$$arch/cleave ./cmd/cleave; \
	  for kind in $(KINDS); do \
	    ARCH=$$arch VERSION="$(PACKAGE_VERSION)" "$$nfpm" package --config packaging/nfpm.yaml --packager $$kind --target dist/packages/ >/dev/null; \
	  done; \
	done
	@ls -l $(addprefix dist/packages/*.,$(KINDS))

.PHONY: demo
demo: ## A node with two disks, in one command; KEEP=1 leaves it running, DOWN=1 takes that down
ifneq ($(filter-out 0 no false,$(DOWN)),)
	@go run ./integration/demo -down
else
	@echo "demo: 1. distribution packages and the real peers (built the first time, some 4 minutes), 2. cleave, 3. the demo itself, some 15 seconds"
	@$(MAKE) deps
	@$(TOOLCHAIN) get $(PEERS) >/dev/null
	@$(MAKE) -s build
	@go run ./integration/demo -cleave bin/cleave $(if $(filter-out 0 no false,$(KEEP)),-keep)
endif

.PHONY: test
test: ## Lint and all tests, against real binaries (this is what CI runs)
	@echo "test: 1. distribution packages and real peers, 2. lint, 3. unit tests, 4. integration tests, with the race detector; 5. decisions against the kubelet's code"
	@echo "test: the first time the peers and the kubelet's code are built from Go modules, about 12 minutes on two cores; then it is about a quarter of an hour in all"
	@[ "$$(id -u)" = 0 ] || echo "test: not root, so tests of mounts, containerd and cgroups are skipped; run it as root to have them all"
	@$(MAKE) deps
	@$(TOOLCHAIN) get $(PEERS) critest $(KUBERNETES) >/dev/null
	@rm -rf $(RESULTS)
	@rc=0; \
	$(MAKE) lint || rc=1; \
	$(MAKE) test-unit || rc=1; \
	$(MAKE) test-integration || rc=1; \
	$(MAKE) test-oracle || rc=1; \
	$(MAKE) test-alerts || rc=1; \
	$(MAKE) summary || rc=1; \
	exit $$rc

# All shipped scenarios; SCENARIOS=PATTERN chooses, as go test's -run does.
SCENARIOS ?= .*

.PHONY: lab-all
lab-all: deps ## Play all scenarios of docs/lab on real nodes: on ext4, half on xfs, split ones with a real kubelet, against the simulator (root; 15 minutes)
	@$(TOOLCHAIN) get $(PEERS) $(KUBERNETES) >/dev/null
	@echo "lab-all: two nodes at a time; time is real there"
	@mkdir -p $(RESULTS)
	@CLEAVE_LAB=all $(call gotestsum,lab,standard-verbose) -timeout 60m -count=1 -parallel 2 -run '^(TestScenarios|TestUpWithAKubelet)$$/$(SCENARIOS)' ./integration/lab

# Both kinds of tests: gotestsum shows each package as it ends, each failure in full, and keeps every event.
gotestsum = "$$($(TOOLCHAIN) get gotestsum)" --format $(or $(2),pkgname) --format-hide-empty-pkg --jsonfile $(RESULTS)/$(1).json -- -race

# For make test: eight failures at most, subtests counted, are tried once more, save data races; the summary names what passed only then.
# Such a test is still a bug to be found, but one late machine in a thousand tests is no reason to know nothing.
AGAIN = --rerun-fails=1 --rerun-fails-max-failures=8 --rerun-fails-run-root-test --rerun-fails-abort-on-data-race --rerun-fails-report=$(RESULTS)/$(1).again
gotestsum-again = "$$($(TOOLCHAIN) get gotestsum)" --format pkgname --format-hide-empty-pkg --jsonfile $(RESULTS)/$(1).json $(AGAIN) --packages "$(2)" -- -race

.PHONY: test-unit
test-unit: ## Tests of all packages (some need root)
	@echo "test-unit: all packages but integration"
	@mkdir -p $(RESULTS)
	@$(call gotestsum-again,unit,$$(go list ./... | grep -v '/cleave/integration' | tr '\n' ' ')) -timeout 10m
	@echo "test-unit: what the race detector would falsify: allocations of the proxy"
	@go test -count=1 -run '^TestAllocation' -v ./proxy | grep -v '^='

.PHONY: test-integration
test-integration: ## Tests against real containerd, runc and critest (root)
	@echo "test-integration: cleave between real clients and a real containerd; the tests mostly wait, so four at a time, and two packages"
	@mkdir -p $(RESULTS)
	@$(TOOLCHAIN) get $(PEERS) critest $(KUBERNETES) >/dev/null
	@$(call gotestsum-again,integration,./integration/...) -timeout 30m -p 2 -parallel 4

.PHONY: test-critest
test-critest: deps ## All critest specs, direct and through cleave, compared (root; 5 minutes)
	@$(TOOLCHAIN) get $(PEERS) critest >/dev/null
	@echo "test-critest: every spec twice, directly and through cleave"
	@mkdir -p $(RESULTS)
	@CLEAVE_CRITEST=full $(call gotestsum,critest,standard-verbose) -timeout 60m -count=1 -run '^TestCritest' ./integration

.PHONY: test-handover
test-handover: deps ## 10 000 calls across 20 handovers, and across 20 kills, with a pull of 60 s in flight (root; 2 minutes)
	@$(TOOLCHAIN) get $(PEERS) >/dev/null
	@echo "test-handover: eight callers in front of a real containerd, while cleave is replaced or killed 20 times"
	@mkdir -p $(RESULTS)
	@CLEAVE_HANDOVERS=long $(call gotestsum,handover,standard-verbose) -timeout 30m -count=1 -run '^Test(HandoverLosesNothing|KillLosesOnlyWhatIsInFlight)$$' ./integration

.PHONY: test-kube
test-kube: ## What cleave asks of a real API server, with the server away for a minute (root; 3 minutes)
	@$(TOOLCHAIN) get kube-apiserver etcd >/dev/null
	@mkdir -p $(RESULTS)
	@CLEAVE_KUBE=long $(call gotestsum,kube,standard-verbose) -timeout 20m -count=1 -parallel 4 ./integration/kube

.PHONY: test-crio
test-crio: deps ## Mode crio with a real kubelet and API server, the long runs too (root; some 15 minutes)
	@$(TOOLCHAIN) get $(PEERS) $(KUBERNETES) >/dev/null
	@echo "test-crio: all restarts in all orders, both orders of cAdvisor's handlers, fast and slow fills"
	@mkdir -p $(RESULTS)
	@CLEAVE_CRIO=long $(call gotestsum,crio,standard-verbose) -timeout 60m -count=1 ./integration/crio

# How often each case is run.
RUNS ?= 10

.PHONY: test-evictors
test-evictors: deps ## KSS-24 with the kubelet's evictions and cleave's, RUNS=10 times each, fast and slow, modes crio and cri, both evictors of cleave (root; 3 hours)
	@$(TOOLCHAIN) get $(PEERS) $(KUBERNETES) >/dev/null
	@echo "test-evictors: a disk is filled $(RUNS) times in each of nine ways; cleave is to be first, and the innocent to stay"
	@mkdir -p $(RESULTS)
	@CLEAVE_CRIO=long CLEAVE_KSS24_RUNS=$(RUNS) $(call gotestsum,evictors,standard-verbose) -timeout 300m -count=1 -run '^TestKSS24_CleaveEvictsTheFiller$$' ./integration/crio

# How many crashes; CLEAVE_TORTURE_SEED=N repeats a run.
CRASHES ?= 320

.PHONY: torture-snapshotter
torture-snapshotter: deps ## Crash the snapshotter under a real containerd, CRASHES=320 times (root; 15 minutes)
	@$(TOOLCHAIN) get $(PEERS) >/dev/null
	@echo "torture-snapshotter: $(CRASHES) crashes, at every fault point and at any moment, on ext4 and xfs"
	@mkdir -p $(RESULTS)
	@CLEAVE_TORTURE=$(CRASHES) $(call gotestsum,torture,standard-verbose) -timeout 90m -count=1 -run '^TestCrashesUnderContainerd$$' ./integration

# How many random images on each filesystem with each snapshotter, and how many runs are killed.
IMAGES ?= 200
KILLS ?= 100

.PHONY: torture-reclaim
torture-reclaim: deps ## Delete IMAGES=200 random images on ext4 and xfs, both snapshotters; kill KILLS=100 runs twice (root; 35 minutes)
	@$(TOOLCHAIN) get $(PEERS) kubelet >/dev/null
	@echo "torture-reclaim: $(IMAGES) images four times: what comes free is what was promised; $(KILLS) runs killed at any moment, and as many of cleave serve"
	@mkdir -p $(RESULTS)
	@rc=0; \
	CLEAVE_RECLAIM_IMAGES=$(IMAGES) CLEAVE_RECLAIM_KILLS=$(KILLS) $(call gotestsum,reclaim,standard-verbose) -timeout 90m -count=1 -run '^(TestRandomImages|TestKilledMidPlan)$$' ./integration/reclaim || rc=1; \
	CLEAVE_RECLAIM_SERVES=$(KILLS) $(call gotestsum,reclaim-serve,standard-verbose) -timeout 130m -count=1 -run '^TestServeIsKilledMidReclaim$$' ./integration/crio || rc=1; \
	exit $$rc

# The kubelet's code is compiled for it: about 7 minutes the first time on two cores, seconds after that.
# -mod=mod: its requirements follow those of our own go.mod. Without cgo it shares compiled packages with the kubelet that the
# toolchain builds.
ORACLE := -mod=mod -count=1 -timeout
# Where the scenarios begin; each has the next number.
ORACLESEED ?= 1

.PHONY: test-oracle
test-oracle: ## Our decisions against the kubelet's own code: 10 000 passes (7 minutes the first time, then seconds)
	@echo "test-oracle: the kubelet's eviction manager, image collector, threshold parser and settings, and ours, in the same random scenarios, and with pods of a real API server"
	@mkdir -p $(RESULTS)
	@$(TOOLCHAIN) get kube-apiserver etcd >/dev/null
	@gotestsum="$$($(TOOLCHAIN) get gotestsum)"; cd integration/kubeletoracle; export CGO_ENABLED=0; \
	nice "$$gotestsum" --format pkgname --jsonfile "$(CURDIR)/$(RESULTS)/oracle.json" -- $(ORACLE) 20m . -steps 10000 -seed $(ORACLESEED); \
	echo "test-oracle: the kubelet's cAdvisor: its client and handlers for CRI-O, and the names and answers of mode crio"; \
	nice "$$gotestsum" --format pkgname --jsonfile "$(CURDIR)/$(RESULTS)/cadvisor.json" -- $(ORACLE) 20m ./cadvisor

# -mod=mod: as above, its requirements follow those of our own go.mod.
.PHONY: test-alerts
test-alerts: ## Each alert rule and the dashboard, with Prometheus's own code (2 minutes the first time, then a second)
	@echo "test-alerts: alert rules and dashboard against Prometheus's rules and the metrics that there are"
	@mkdir -p $(RESULTS)
	@gotestsum="$$($(TOOLCHAIN) get gotestsum)"; cd integration/alerts; CGO_ENABLED=0 \
	nice "$$gotestsum" --format pkgname --jsonfile "$(CURDIR)/$(RESULTS)/alerts.json" -- -mod=mod -count=1 -timeout 10m .

.PHONY: docs
docs: ## Write what of the documentation is generated: the table of metrics
	@CLEAVE_WRITE_DOCS=1 go test -count=1 -run '^TestDocumentation' ./web

.PHONY: oracle
oracle: ## The same for 200 000 passes; ORACLESEED=N begins elsewhere
	@echo "oracle: the kubelet's eviction manager, image collector, threshold parser and settings, and ours, in the same random scenarios"
	@cd integration/kubeletoracle; CGO_ENABLED=0 nice go test -v $(ORACLE) 60m . -steps 200000 -seed $(ORACLESEED)

.PHONY: test-snapshotter
test-snapshotter: deps ## containerd's own tests of a snapshotter with every set of options on ext4, xfs and btrfs (root; 6 minutes)
	@echo "test-snapshotter: the suite with each set of options, one after the other"
	@mkdir -p $(RESULTS)
	@CLEAVE_SUITE=all $(call gotestsum,suite,pkgname) -timeout 60m -count=1 -run '^TestSuite$$' ./snapshot/split

# Booting a guest needs packages of its own (qemu and mmdebstrap, 400 MB installed), so only these targets ask for them.
.PHONY: test-guest
test-guest: deps ## Nodes in a Linux of their own: systemd, cgroup v2, cleave and the kubelet as units (root; qemu; 6 minutes)
	@$(TOOLCHAIN) deps guest
	@echo "test-guest: real peers, the kubelet and the API server too; some 12 minutes the first time"
	@$(TOOLCHAIN) get $(PEERS) etcd kube-apiserver kubelet >/dev/null
	@echo "test-guest: boots guests in qemu, each some 15 seconds; their root is made and cached the first time, half a minute"
	@mkdir -p $(RESULTS)
	@CLEAVE_GUEST=1 $(call gotestsum,guest,standard-verbose) -timeout 150m -count=1 -skip '^Test(Quota|QuotaNode|CRIO|Systemd|Install)$$' ./integration/guest

.PHONY: test-guest-crio
test-guest-crio: deps ## Mode crio there: what the kubelet sees, limits, eviction by the real kubelet (root; qemu; 8 minutes)
	@$(TOOLCHAIN) deps guest
	@echo "test-guest-crio: real peers, the kubelet and the API server too; some 12 minutes the first time"
	@$(TOOLCHAIN) get $(PEERS) etcd kube-apiserver kubelet >/dev/null
	@echo "test-guest-crio: boots one guest in qemu; the kubelet in it measures containers once a minute, and programs are some nine times slower"
	@mkdir -p $(RESULTS)
	@CLEAVE_GUEST=1 $(call gotestsum,guest-crio,standard-verbose) -timeout 75m -count=1 -run '^TestCRIO$$' ./integration/guest

# Which courses: Systemd is about units and package, Install about a kubelet and containerd that had no cleave.
COURSES ?= Systemd|Install

.PHONY: test-systemd-vm
test-systemd-vm: deps ## cleave under a real systemd: install with a real kubelet, upgrade, watchdog, crash loop, no memory, uninstall (root; qemu; 12 minutes)
	@$(TOOLCHAIN) deps guest
	@$(TOOLCHAIN) get $(PEERS) kubelet >/dev/null
	@echo "test-systemd-vm: two versions of the package"
	@rm -rf dist/guest; mkdir -p dist/guest
	@for n in 1 2; do \
	  $(MAKE) packages ARCHITECTURES="$$(go env GOARCH)" KINDS=deb VERSION="guest-$$n" PACKAGE_VERSION="0.0.$$n" >/dev/null; \
	  mv dist/packages/*.deb "dist/guest/$$n.deb"; \
	done
	@echo "test-systemd-vm: boots two guests in qemu, one after the other; their root is made and cached the first time, half a minute"
	@mkdir -p $(RESULTS)
	@CLEAVE_GUEST=1 CLEAVE_GUEST_PACKAGES="$(CURDIR)/dist/guest" $(call gotestsum,systemd-vm,standard-verbose) -timeout 60m -count=1 -run '^Test($(COURSES))$$' ./integration/guest

.PHONY: test-quota-vm
test-quota-vm: deps ## Project quota and hard limits on ext4 and xfs, in guests whose kernel has them, with containerd too (root; qemu; 8 minutes)
	@$(TOOLCHAIN) deps guest
	@$(TOOLCHAIN) get $(PEERS) >/dev/null
	@echo "test-quota-vm: boots guests in qemu; their root is made and cached the first time, half a minute"
	@mkdir -p $(RESULTS)
	@CLEAVE_GUEST=1 $(call gotestsum,quota-vm,standard-verbose) -timeout 60m -count=1 -run '^TestQuota(Node)?$$' ./integration/guest

# Which cells to run: KUBELET/CONTAINERD/MODE, patterns of go test's -run.
CELLS ?= .*

.PHONY: matrix
matrix: deps ## Four kubelets, two containerds, two modes; writes docs/compatibility.md (root; 15 minutes, 30 the first time)
	@echo "matrix: 1. older kubelets and containerd, about 15 minutes the first time on two cores, 2. a node for each cell, 3. the page"
	@$(TOOLCHAIN) get $(PEERS) $(KUBERNETES) $(OLDER) >/dev/null
	@mkdir -p $(RESULTS)
	@rm -f $(RESULTS)/cells.jsonl
	@rc=0; \
	CLEAVE_MATRIX="$(CURDIR)/$(RESULTS)/cells.jsonl" $(call gotestsum,matrix,standard-verbose) -timeout 90m -count=1 -run '^TestMatrix$$/$(CELLS)' ./integration/crio || rc=1; \
	go run ./integration/matrix $(RESULTS)/cells.jsonl || rc=1; \
	exit $$rc

.PHONY: summary
summary:
	@"$$($(TOOLCHAIN) get gotestsum)" --format none --raw-command \
	  --post-run-command 'bash -c "echo $$((TESTS_TOTAL - TESTS_FAILED - TESTS_SKIPPED)) passed, $$((TESTS_FAILED + TESTS_ERRORS)) failed, $$TESTS_SKIPPED skipped"' \
	  -- cat $(wildcard $(RESULTS)/unit.json $(RESULTS)/integration.json $(RESULTS)/oracle.json $(RESULTS)/cadvisor.json $(RESULTS)/alerts.json)
	@if cat $(RESULTS)/*.again 2>/dev/null | grep -q .; then echo "summary: failed at first, then run again:"; cat $(RESULTS)/*.again; fi

.PHONY: bench
bench: ## All Go benchmarks, with allocations
	go test -run '^$$' -bench . -benchmem ./...

.PHONY: bench-proxy
bench-proxy: deps build ## What the proxy costs: direct and through cleave, interleaved (root)
	@$(TOOLCHAIN) get $(PEERS) >/dev/null
	@go run ./integration/bench -cleave bin/cleave proxy

.PHONY: bench-redirect
bench-redirect: deps build ## How fast 500 MiB of content are written and read through cleave in containerd's place, relative to direct (root)
	@$(TOOLCHAIN) get $(PEERS) >/dev/null
	@go run ./integration/bench -cleave bin/cleave redirect

# For how long each of the three phases is measured.
BENCHTIME ?= 3m

.PHONY: bench-crio
bench-crio: deps ## What the kubelet and cleave take of a core with 30 idle pods: on containerd, in modes cri and crio (root; 15 minutes)
	@$(TOOLCHAIN) get $(PEERS) $(KUBERNETES) >/dev/null
	@echo "bench-crio: three nodes with 30 idle pods, each measured for $(BENCHTIME)"
	@CLEAVE_BENCH_CRIO=$(BENCHTIME) go test -count=1 -timeout 90m -v -run '^TestBenchCRIO$$' ./integration/crio | awk ' \
	  /^BENCH / { print; lines++ } { all = all $$0 "\n" } \
	  END { if (!lines) { printf "%s", all > "/dev/stderr"; exit 1 } }'

# How many evictions are measured; cleave evicts at most 30 in an hour.
EVICTIONS ?= 10

.PHONY: bench-evict
bench-evict: deps ## How long it takes from crossing a threshold to the eviction call, of EVICTIONS=10 (root; 3 minutes)
	@$(TOOLCHAIN) get $(PEERS) $(KUBERNETES) >/dev/null
	@echo "bench-evict: a node in mode cri on which a pod fills the disk, $(EVICTIONS) times"
	@CLEAVE_BENCH_EVICT=$(EVICTIONS) go test -count=1 -timeout 60m -v -run '^TestBenchEvict$$' ./integration/crio | awk ' \
	  /^BENCH / { print; lines++ } { all = all $$0 "\n" } \
	  END { if (!lines) { printf "%s", all > "/dev/stderr"; exit 1 } }'

.PHONY: bench-engine
bench-engine: ## What one decision costs (500 pods, 1 000 images), and how fast the simulator is
	@go test -run '^$$' -bench . -benchmem ./engine ./engine/sim | awk ' \
	  /^BenchmarkDecision/ { printf "BENCH engine.decision.ms %.3f ms\nBENCH engine.decision.bytes %d bytes\n", $$3 / 1e6, $$5 } \
	  /^BenchmarkSteps/ { split($$1, name, /[\/-]/); printf "BENCH engine.sim.steps_per_minute.%s %d steps\n", name[2], $$5; if (!least || $$5 < least) least = $$5 } \
	  /^FAIL/ { failed = 1 } \
	  END { if (failed || !least) { print "bench-engine: a benchmark failed" > "/dev/stderr"; exit 1 }; printf "BENCH engine.sim.steps_per_minute %d steps\n", least }'

.PHONY: bench-inventory
bench-inventory: ## What the picture of 1 000 images with 5 000 layers costs: time, and memory with all that it is made from
	@go test -run '^$$' -bench '^BenchmarkBuild$$' ./snapshot/inventory | awk ' \
	  /^BenchmarkBuild/ { printf "BENCH inventory.build_ms %.1f ms\nBENCH inventory.heap_mib %.1f MiB\n", $$3 / 1e6, $$5; done = 1 } \
	  /^FAIL/ { failed = 1 } \
	  END { if (failed || !done) { print "bench-inventory: the benchmark failed" > "/dev/stderr"; exit 1 } }'

.PHONY: bench-metrics
bench-metrics: ## What one answer with the metrics of 500 containers costs
	@go test -run '^$$' -bench '^BenchmarkMetrics$$' ./agent | awk ' \
	  /^BenchmarkMetrics/ { printf "BENCH metrics.scrape_ms %.1f ms\n", $$3 / 1e6; for (i = 3; i < NF; i += 2) if ($$(i + 1) == "page-bytes") { printf "BENCH metrics.bytes %d bytes\n", $$i; lines++ } } \
	  /^(FAIL|---)/ { failed = 1 } \
	  END { if (failed || !lines) { print "bench-metrics: the benchmark failed" > "/dev/stderr"; exit 1 } }'

.PHONY: bench-kube
bench-kube: ## What 1 000 pods of 50 KB take of the heap
	@go test -run '^$$' -bench '^BenchmarkThousandPods$$' -benchtime 3x ./kube | awk ' \
	  /^BenchmarkThousandPods/ { for (i = 3; i < NF; i += 2) if ($$(i + 1) == "heap-bytes") { printf "BENCH kube.pods_1000.heap_bytes %d bytes\n", $$i; lines++ } } \
	  /^(FAIL|---)/ { failed = 1 } \
	  END { if (failed || !lines) { print "bench-kube: the benchmark failed" > "/dev/stderr"; exit 1 } }'

.PHONY: bench-snapshotter
bench-snapshotter: deps build ## What the split snapshotter costs and gains beside overlayfs (root)
	@$(TOOLCHAIN) get $(PEERS) >/dev/null
	@go run ./integration/bench -cleave bin/cleave snapshotter

.PHONY: bench-walk
bench-walk: deps ## What measuring 200 000 files costs, beside containerd's walk, the standard library's and du (root)
	@go run ./integration/bench walk

.PHONY: bench-idle
bench-idle: deps ## What the usage index takes of a core: a million inodes at rest, and one of 40 trees written to (root; 5 minutes)
	@go run ./integration/bench idle

.PHONY: bench-fanotify
bench-fanotify: deps ## What watching a filesystem with fanotify costs the writer and the reader (root)
	@go run ./integration/bench fanotify

# How often each is attacked, relative to three times.
REACTSCALE ?= 1

.PHONY: bench-react
bench-react: deps build ## How fast the kubelet and cleave react to a disk that fills up, and what it costs others (root; 10 minutes)
	@$(TOOLCHAIN) get $(PEERS) kubelet >/dev/null
	@go run ./integration/bench -cleave bin/cleave -scale $(REACTSCALE) react

.PHONY: fuzz
fuzz: ## Run each fuzz target for FUZZTIME (20s)
	@for pkg in $$(go list ./...); do \
	  for target in $$(go test -list '^Fuzz' "$$pkg" | grep '^Fuzz' || true); do \
	    echo "fuzz: $$pkg $$target for $(FUZZTIME)"; \
	    go test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) "$$pkg"; \
	  done; \
	done

.PHONY: lint
lint: ## golangci-lint with the house rules; zero findings
	@linter="$$($(TOOLCHAIN) get golangci-lint)"; \
	echo "lint: golangci-lint on all packages; a minute the first time"; \
	"$$linter" config verify; \
	"$$linter" run --allow-parallel-runners ./...

.PHONY: toolchain
toolchain: ## Build all real peers, the kubelet and the API server too (about 12 minutes the first time)
	@$(TOOLCHAIN) get all

.PHONY: deps
deps: ## Install missing distribution packages (root), or say which
	@$(TOOLCHAIN) deps

.PHONY: clean
clean: ## Remove what was built in this checkout; the toolchain's cache stays
	rm -rf bin dist
