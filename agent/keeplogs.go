package agent

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/cleave-cri/cleave/agent/lastlogs"
	"github.com/cleave-cri/cleave/engine"
	"github.com/cleave-cri/cleave/snapshot/split/rootdir"
)

const (
	// keepLogsTimeout is how long an eviction waits for the ends of logs.
	keepLogsTimeout = 2 * time.Second
	// mostKept is of how many containers of a pod a log is kept.
	mostKept = 16
)

// currentLog is the file that a container's output goes to, named by the number of its restarts (kubelet, pkg/kubelet/kuberuntime:
// buildContainerLogsPath).
var currentLog = regexp.MustCompile(`^([0-9]{1,9})\.log$`)

// keepLogs keeps the ends of the logs of a pod that is about to go. It holds an eviction up for some seconds at most, and stops none.
func (d *decisions) keepLogs(ctx context.Context, e engine.Eviction) {
	if !d.cfg.Reclaim.KeepLogs {
		return
	}
	if !d.reading.CompareAndSwap(false, true) {
		d.log.Warn("the logs of a pod that is evicted are not kept, because those of another one can't be read", zap.String("pod", e.Namespace+"/"+e.Name))
		return
	}
	ended := make(chan error, 1)
	go func() { // ends when the filesystem of the logs answers; there is one at most
		defer d.reading.Store(false)
		ended <- d.readAndKeep(e)
	}()
	limit := time.NewTimer(keepLogsTimeout)
	defer limit.Stop()
	var err error
	select {
	case err = <-ended:
	case <-limit.C:
		err = fmt.Errorf("they can't be read within %s", keepLogsTimeout)
	case <-ctx.Done():
	}
	if err != nil {
		d.log.Warn("not all logs of a pod that is evicted are kept", zap.String("pod", e.Namespace+"/"+e.Name), zap.Error(err))
	}
}

// openKept opens what takes them. It is nil where none are kept.
func (d *decisions) openKept() (*lastlogs.Keeper, error) {
	d.opening.Lock()
	defer d.opening.Unlock()
	if kept := d.kept.Load(); kept != nil || !d.cfg.Reclaim.KeepLogs {
		return kept, nil
	}
	kept, err := lastlogs.Open(filepath.Join(d.cfg.StateDir, lastlogs.FileName))
	if err == nil {
		d.kept.Store(kept)
	}
	return kept, err
}

func (d *decisions) readAndKeep(e engine.Eviction) (err error) {
	kept, err := d.openKept()
	if err != nil {
		return err
	}
	logs, err := readEnds(d.cfg.Filesystems.Logs, e)
	for _, l := range logs {
		err = errors.Join(err, kept.Keep(l))
	}
	return err
}

// readEnds reads the end of the newest log of each container of a pod. It follows no symlink: a log may be one that leads elsewhere.
func readEnds(dir string, e engine.Eviction) (out []lastlogs.Log, err error) {
	root, err := rootdir.Open(dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, root.Close()) }()
	folder := strings.Join([]string{e.Namespace, e.Name, e.UID}, "_")
	containers, err := root.Names(folder)
	if err != nil {
		return nil, err
	}
	for _, name := range containers[:min(len(containers), mostKept)] {
		place, statErr := root.Stat(filepath.Join(folder, name))
		if statErr != nil || !place.IsDir() {
			continue
		}
		files, listErr := root.Names(filepath.Join(folder, name))
		err = errors.Join(err, listErr)
		newest := newestLog(files)
		if newest == "" {
			continue
		}
		path := filepath.Join(folder, name, newest)
		text, size, readErr := root.ReadEnd(path, lastlogs.MaxBytes)
		if readErr != nil {
			err = errors.Join(err, readErr)
			continue
		}
		out = append(out, lastlogs.Log{Namespace: e.Namespace, Pod: e.Name, UID: e.UID, Container: name, File: path, At: time.Now(), SizeBytes: size, Text: text})
	}
	return out, err
}

func newestLog(files []string) (newest string) {
	most := -1
	for _, name := range files {
		m := currentLog.FindStringSubmatch(name)
		if m == nil {
			continue
		}
		if n, err := strconv.Atoi(m[1]); err == nil && n > most {
			newest, most = name, n
		}
	}
	return newest
}
