package engine

// Version numbers the decisions: it changes with every change by which the same
// input may come to another decision. Records carry it.
const Version = 4
