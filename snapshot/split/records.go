package split

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	bolt "go.etcd.io/bbolt"

	"github.com/cleave-cri/cleave/snapshot/split/fence"
)

// Our own facts lie in the same file as those of containerd's storage package,
// in a bucket of our own, and change in the same transactions. So nothing about
// placement is in a label, where others could write it or containerd's Update
// and Commit would replace it.
//
//	cleave
//	  schema       version of this form
//	  identity     random, the same as in the roots' markers
//	  containerd   identity of the containerd that this belongs to; missing: none yet
//	  roots        role → fence.Recorded
//	  snapshots    ID → record
//	  leaving      ID → role; removed, and the folder could not be moved yet; made when needed
var (
	ownBucket       = []byte("cleave")
	schemaKey       = []byte("schema")
	identityKey     = []byte("identity")
	containerdKey   = []byte("containerd")
	rootsBucket     = []byte("roots")
	snapshotsBucket = []byte("snapshots")
	leavingBucket   = []byte("leaving")
)

// schemaVersion is the form that this program writes. It reads no newer one.
const schemaVersion = 1

// Errors of a database that can't be opened as one of ours.
var (
	// ErrNotInitialised says that there is no database of a snapshotter.
	ErrNotInitialised = errors.New("the snapshotter is not initialised here: run `cleave snapshotter init` on empty roots")
	// ErrNewerSchema says that a newer cleave wrote the database.
	ErrNewerSchema = errors.New("a newer cleave wrote this database: use that version or a newer one")
)

// record is what we know of a snapshot beyond containerd's own facts.
type record struct {
	// Root is where its folder is. It never changes.
	Root fence.Role `json:"root"`
	// Figure is the usage once it is final, that is of a committed layer.
	Figure *figure `json:"figure,omitempty"`
}

// figure is a measured usage.
type figure struct {
	Bytes  int64     `json:"bytes"`
	Inodes int64     `json:"inodes"`
	At     time.Time `json:"at"`

	// started is when measuring began, and how what was done; not stored.
	started time.Time
	how     string
}

// own gives our bucket in a transaction, after a look at its version.
func own(tx *bolt.Tx) (*bolt.Bucket, error) {
	b := tx.Bucket(ownBucket)
	if b == nil {
		return nil, ErrNotInitialised
	}
	version, err := strconv.Atoi(string(b.Get(schemaKey)))
	if err != nil {
		return nil, fmt.Errorf("read the database's schema version: %w", err)
	}
	if version > schemaVersion {
		return nil, fmt.Errorf("%w (its schema is %d, this program's %d)", ErrNewerSchema, version, schemaVersion)
	}
	if b.Bucket(rootsBucket) == nil || b.Bucket(snapshotsBucket) == nil || len(b.Get(identityKey)) == 0 {
		return nil, errors.New("the database lacks parts of our own records: restore it from a backup")
	}
	return b, nil
}

func initialise(tx *bolt.Tx, identity string, roots map[fence.Role]fence.Recorded) error {
	b, err := tx.CreateBucket(ownBucket)
	if err != nil {
		return err
	}
	if err := errors.Join(
		b.Put(schemaKey, []byte(strconv.Itoa(schemaVersion))),
		b.Put(identityKey, []byte(identity)),
	); err != nil {
		return err
	}
	for _, name := range [][]byte{rootsBucket, snapshotsBucket} {
		if _, err := b.CreateBucket(name); err != nil {
			return err
		}
	}
	for role, r := range roots {
		if err := putJSON(b.Bucket(rootsBucket), string(role), r); err != nil {
			return err
		}
	}
	return nil
}

func getRoot(b *bolt.Bucket, role fence.Role) (fence.Recorded, error) {
	var r fence.Recorded
	found, err := getJSON(b.Bucket(rootsBucket), string(role), &r)
	if err == nil && !found {
		err = fmt.Errorf("the database knows nothing of the %s root", role)
	}
	return r, err
}

// getRecord reads a snapshot's record; found is false if there is none.
func getRecord(b *bolt.Bucket, id string) (r record, found bool, err error) {
	found, err = getJSON(b.Bucket(snapshotsBucket), id, &r)
	if err == nil && found && r.Root != fence.Image && r.Root != fence.Container {
		err = fmt.Errorf("the record of snapshot %s names the root %q", id, r.Root)
	}
	return r, found, err
}

// mustRecord reads the record of a snapshot that containerd's part knows.
func mustRecord(b *bolt.Bucket, id string) (record, error) {
	r, found, err := getRecord(b, id)
	if err == nil && !found {
		err = fmt.Errorf("snapshot %s has no record of its place: run `cleave snapshotter check`", id)
	}
	return r, err
}

func putRecord(b *bolt.Bucket, id string, r record) error {
	return putJSON(b.Bucket(snapshotsBucket), id, r)
}

func deleteRecord(b *bolt.Bucket, id string) error {
	return b.Bucket(snapshotsBucket).Delete([]byte(id))
}

// eachRecord visits all records, in no order of meaning.
func eachRecord(b *bolt.Bucket, visit func(id string, r record) error) error {
	return b.Bucket(snapshotsBucket).ForEach(func(k, v []byte) error {
		var r record
		if err := json.Unmarshal(v, &r); err != nil {
			return fmt.Errorf("read the record of snapshot %q: %w", k, err)
		}
		return visit(string(k), r)
	})
}

// putLeaving notes that the snapshot with this folder was removed and that the
// folder is still in place. An ID that was removed is never given out again, so
// whatever copy of the database has the note, it is about this folder.
func putLeaving(b *bolt.Bucket, f Folder) error {
	leaving, err := b.CreateBucketIfNotExists(leavingBucket)
	if err != nil {
		return err
	}
	return leaving.Put([]byte(f.Name), []byte(f.Root))
}

func getLeaving(b *bolt.Bucket) (map[Folder]bool, error) {
	folders := map[Folder]bool{}
	leaving := b.Bucket(leavingBucket)
	if leaving == nil {
		return folders, nil
	}
	return folders, leaving.ForEach(func(k, v []byte) error {
		folders[Folder{Root: fence.Role(v), Name: string(k)}] = true
		return nil
	})
}

func deleteLeaving(b *bolt.Bucket, folders []Folder) error {
	leaving := b.Bucket(leavingBucket)
	if leaving == nil {
		return nil
	}
	for _, f := range folders {
		if err := leaving.Delete([]byte(f.Name)); err != nil {
			return err
		}
	}
	return nil
}

func putJSON(b *bolt.Bucket, key string, v any) error {
	content, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return b.Put([]byte(key), content)
}

func getJSON(b *bolt.Bucket, key string, v any) (found bool, err error) {
	content := b.Get([]byte(key))
	if content == nil {
		return false, nil
	}
	if err := json.Unmarshal(content, v); err != nil {
		return false, fmt.Errorf("read the database's entry %q: %w", key, err)
	}
	return true, nil
}
