package agent

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/cleave-cri/cleave/agent/control"
	"github.com/cleave-cri/cleave/fsstats/index"
)

// pathUsage is where the control socket answers with a [Usage].
const pathUsage = "/v1/usage"

// Usage is all that is known of who holds what, owner by owner: what Status adds up.
type Usage struct {
	At     time.Time    `json:"at"`
	Owners []OwnerUsage `json:"owners"`
	// Entries counts the inodes that were looked at since the start, by reason.
	Entries index.Entries `json:"entries"`
}

// OwnerUsage is somebody who holds bytes, such as a container.
type OwnerUsage struct {
	Kind string `json:"kind"`
	// ID is what identifies one of its kind: a container's ID, a pod's UID, a path.
	ID    string      `json:"id,omitempty"`
	Parts []PartUsage `json:"parts"`
}

// PartUsage is something that an owner has on one filesystem.
type PartUsage struct {
	Name string `json:"name"`
	Path string `json:"path,omitempty"`
	// Device is its filesystem, empty while unknown.
	Device string `json:"device,omitempty"`
	// Figure is nil while nothing is known: unknown is not zero.
	Figure *index.Figure `json:"figure,omitempty"`
	// HoldsUntil is until when nothing is known to have changed it.
	HoldsUntil time.Time `json:"holdsUntil,omitzero"`
	// MeasuringSince says that it is being measured.
	MeasuringSince time.Time `json:"measuringSince,omitzero"`
	Gone           bool      `json:"gone,omitempty"`
	Problem        string    `json:"problem,omitempty"`
}

// usage tells what the index knows. It waits for nothing.
func (o *observer) usage() Usage {
	v, filesystems := o.index.View(), o.known(o.surveyed.Load())
	u := Usage{At: v.At, Entries: v.Entries, Owners: make([]OwnerUsage, 0, len(v.Owners))}
	for _, owner := range v.Owners {
		out := OwnerUsage{Kind: string(owner.Kind), ID: owner.ID}
		for _, p := range owner.Parts {
			part := PartUsage{
				Name: p.Name, Path: p.Path, Figure: p.Figure, HoldsUntil: p.Unmoved,
				MeasuringSince: p.Measuring, Gone: p.Gone, Problem: p.Problem,
			}
			if f, ok := filesystems[p.FS]; ok {
				part.Device = f.Device.String()
			}
			out.Parts = append(out.Parts, part)
		}
		u.Owners = append(u.Owners, out)
	}
	return u
}

// FetchUsage asks the cleave that is running who holds what. It returns
// [ErrNotRunning] if none answers on the socket.
func FetchUsage(ctx context.Context, socket string) (Usage, error) {
	var usage Usage
	err := control.Ask(ctx, socket, http.MethodGet, pathUsage, &usage)
	if errors.Is(err, control.ErrNotRunning) {
		err = ErrNotRunning
	}
	if err != nil {
		return Usage{}, fmt.Errorf("ask who holds what on %s: %w", socket, err)
	}
	return usage, nil
}
