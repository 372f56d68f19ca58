// Package packaging holds what the deb and rpm are made from: their description
// (nfpm.yaml) and what they run when they are installed, upgraded and removed.
// `make packages` makes them. There is no code here but the test of the scripts.
package packaging
