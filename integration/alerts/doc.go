// Package alerts is only tests: it tries the alert rules that cleave ships with Prometheus's own parser, engine and rules, and holds
// them and the dashboard to the metrics that cleave has. It is a module of its own, because Prometheus's code may never get into what
// cleave ships.
package alerts
