// Package agent is the one place where the parts of cleave meet: it wires the
// proxy with what is measured, holds the loop, the control socket and the
// checks of `cleave doctor`. It may import every other package; only cmd,
// agent/top and agent/dump, which show its answers, and lab/node, which makes
// nodes of the whole program, may import it.
package agent
