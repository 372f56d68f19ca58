package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"time"

	contentapi "github.com/containerd/containerd/api/services/content/v1"
	"google.golang.org/grpc/metadata"

	"github.com/cleave-cri/cleave/integration/toolchain/bin"
	"github.com/cleave-cri/cleave/lab/janitor"
	"github.com/cleave-cri/cleave/lab/node"
)

const (
	contentBytes = 500 << 20
	// chunkBytes is what containerd's own client writes at a time (2.4,
	// core/content, bufPool).
	chunkBytes = 1 << 20
	// contentRounds is how often each way writes and reads it.
	contentRounds = 5
)

// benchRedirect measures containerd's content, written and read, by way of cleave
// and directly. Speeds are relative: 1 is as fast as direct.
func benchRedirect(ctx context.Context, cleave string, scale float64) (err error) {
	peers, err := bin.Get(ctx, os.Stderr, "containerd", "shim")
	if err != nil {
		return err
	}
	run, err := janitor.Start(ctx, janitor.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, run.Close(context.WithoutCancel(ctx))) }()
	n, err := node.Start(ctx, run, node.Options{Containerd: peers[0], Shim: peers[1], Cleave: cleave})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close(context.WithoutCancel(ctx))) }()
	var ways []*way
	for _, to := range []struct{ name, socket string }{{"direct", n.Runtime.Socket()}, {"cleave", n.Cleave.Socket()}} {
		w, err := dialWay(to.name, to.socket)
		if err != nil {
			return err
		}
		defer w.conn.Close() //nolint:errcheck // end of the measurement
		ways = append(ways, w)
	}
	blob := make([]byte, contentBytes)
	chacha := rand.NewChaCha8([32]byte{1})
	if _, err := chacha.Read(blob); err != nil {
		return err
	}
	digest := fmt.Sprintf("sha256:%x", sha256.Sum256(blob))
	ctx = metadata.AppendToOutgoingContext(ctx, "containerd-namespace", "bench")
	wrote, read := map[string][]time.Duration{}, map[string][]time.Duration{}
	rounds := max(int(contentRounds*scale), 1)
	for i := range rounds {
		for j := range ways {
			w := ways[(i+j)%len(ways)]
			took, err := writeContent(ctx, w, blob, digest)
			if err != nil {
				return fmt.Errorf("write by way of %s: %w", w.name, err)
			}
			wrote[w.name] = append(wrote[w.name], took)
			for k := range ways {
				w := ways[(i+j+k)%len(ways)]
				if took, err = readContent(ctx, w, digest); err != nil {
					return fmt.Errorf("read by way of %s: %w", w.name, err)
				}
				read[w.name] = append(read[w.name], took)
			}
			if _, err := contentapi.NewContentClient(w.conn).Delete(ctx, &contentapi.DeleteContentRequest{Digest: digest}); err != nil {
				return err
			}
		}
	}
	for name, took := range map[string]map[string][]time.Duration{"write": wrote, "read": read} {
		direct, through := median(took["direct"]), median(took["cleave"])
		report("redirect.content_"+name+"_relative_speed", direct.Seconds()/through.Seconds(), "ratio")
		report("redirect.content_"+name+"_direct_mib_per_second", contentBytes/(1<<20)/direct.Seconds(), "MiB/s")
		report("redirect.content_"+name+"_cleave_mib_per_second", contentBytes/(1<<20)/through.Seconds(), "MiB/s")
	}
	return nil
}

// writeContent writes as containerd's own client does: each piece is answered
// before the next is sent.
func writeContent(ctx context.Context, w *way, blob []byte, digest string) (time.Duration, error) {
	began := time.Now()
	stream, err := contentapi.NewContentClient(w.conn).Write(ctx)
	if err != nil {
		return 0, err
	}
	ask := func(r *contentapi.WriteContentRequest) error {
		r.Ref = "bench"
		if err := stream.Send(r); err != nil {
			return err
		}
		_, err := stream.Recv()
		return err
	}
	if err := ask(&contentapi.WriteContentRequest{Action: contentapi.WriteAction_STAT, Total: int64(len(blob)), Expected: digest}); err != nil {
		return 0, err
	}
	var at int64
	for piece := range slices.Chunk(blob, chunkBytes) {
		if err := ask(&contentapi.WriteContentRequest{Action: contentapi.WriteAction_WRITE, Offset: at, Data: piece}); err != nil {
			return 0, err
		}
		at += int64(len(piece))
	}
	if err := ask(&contentapi.WriteContentRequest{Action: contentapi.WriteAction_COMMIT, Total: at, Offset: at, Expected: digest}); err != nil {
		return 0, err
	}
	return time.Since(began), stream.CloseSend()
}

func readContent(ctx context.Context, w *way, digest string) (time.Duration, error) {
	began := time.Now()
	stream, err := contentapi.NewContentClient(w.conn).Read(ctx, &contentapi.ReadContentRequest{Digest: digest})
	if err != nil {
		return 0, err
	}
	got := 0
	for {
		answer, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return 0, err
		}
		got += len(answer.GetData())
	}
	if got != contentBytes {
		return 0, fmt.Errorf("got %d bytes, want %d", got, contentBytes)
	}
	return time.Since(began), nil
}
