package deputy

import (
	"cmp"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const (
	// rotateEvery is how often logs are looked at. The kubelet does it each 10 s.
	rotateEvery = 2 * time.Second

	defaultLogBytes = 10 << 20
	defaultLogFiles = 5
)

// rotate looks after the logs of all pods until ctx ends.
func (k *keeper) rotate(ctx context.Context) {
	tick := time.NewTicker(rotateEvery)
	defer tick.Stop()
	said := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		err := k.rotateAll(ctx)
		if err != nil && err.Error() != said && ctx.Err() == nil {
			fmt.Fprintf(os.Stderr, "%s rotate logs: %v\n", time.Now().UTC().Format(time.RFC3339), err)
			said = err.Error()
		}
	}
}

func (k *keeper) rotateAll(ctx context.Context) error {
	list, err := k.client.Runtime.ListContainers(ctx, &runtimeapi.ListContainersRequest{
		Filter: &runtimeapi.ContainerFilter{State: &runtimeapi.ContainerStateValue{State: runtimeapi.ContainerState_CONTAINER_RUNNING}},
	})
	if err != nil {
		return fmt.Errorf("list containers: %w", err)
	}
	var errs []error
	for _, c := range list.GetContainers() {
		answer, err := k.client.Runtime.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: c.GetId()})
		if err != nil {
			continue // it ended in this moment
		}
		path := answer.GetStatus().GetLogPath()
		info, err := os.Stat(path)
		if err != nil || info.Size() < cmp.Or(k.o.LogMaxBytes, defaultLogBytes) {
			continue
		}
		if err := k.rotateOne(ctx, c.GetId(), path); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", path, err))
		}
	}
	return errors.Join(errs...)
}

// rotateOne does as the kubelet does (LOG-1 ff.): what is left of an earlier time
// goes, the oldest go, what is not compressed is; then the log gets another name and
// the container a new one. Where compressing fails, nothing is rotated.
func (k *keeper) rotateOne(ctx context.Context, id, path string) error {
	rotated, err := filepath.Glob(path + ".*")
	if err != nil {
		return err
	}
	slices.Sort(rotated)
	var kept []string
	for _, f := range rotated {
		if strings.HasSuffix(f, ".tmp") {
			if err := os.Remove(f); err != nil {
				return err
			}
			continue
		}
		kept = append(kept, f)
	}
	// Besides the log itself and the one that it becomes.
	for most := max(0, cmp.Or(k.o.LogMaxFiles, defaultLogFiles)-2); len(kept) > most; kept = kept[1:] {
		if err := os.Remove(kept[0]); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	for _, f := range kept {
		if !strings.HasSuffix(f, ".gz") {
			if err := compress(f); err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
		}
	}
	to := path + "." + time.Now().UTC().Format("20060102-150405")
	if err := os.Rename(path, to); err != nil {
		return err
	}
	if _, err := k.client.Runtime.ReopenContainerLog(ctx, &runtimeapi.ReopenContainerLogRequest{ContainerId: id}); err != nil {
		return errors.Join(fmt.Errorf("have the container begin a new log: %w", err), os.Rename(to, path))
	}
	return nil
}

// compress replaces a file by a compressed one. It needs space for that.
func compress(path string) (err error) {
	from, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, from.Close()) }()
	temporary := path + ".tmp"
	to, err := os.OpenFile(temporary, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o640)
	if err != nil {
		return err
	}
	w := gzip.NewWriter(to)
	_, err = io.Copy(w, from)
	if err = errors.Join(err, w.Close(), to.Close()); err == nil {
		err = os.Rename(temporary, path+".gz")
	}
	if err != nil {
		return errors.Join(err, os.Remove(temporary))
	}
	return os.Remove(path)
}
