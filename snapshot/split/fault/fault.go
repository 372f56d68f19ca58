// Package fault names the moments at which a crash of the snapshotter leaves
// something half done. A binary that was built with the tag "faultpoints" dies
// of SIGKILL at the moment that the environment variable CLEAVE_FAULT names, as
// "name" or "name:n" for the n-th time that the moment is reached. In any other
// binary nothing happens.
//
// It imports nothing. Only snapshot/split and the packages below it may import
// it.
package fault

// Point is a moment in the work of the snapshotter. The order is that of the
// work.
type Point string

// The moments. What a crash leaves, and who repairs it, is in
// docs/snapshotter-design.md.
const (
	// CreateMarked: the temporary folder has its project ID, where there are any.
	CreateMarked Point = "create-marked"
	// CreateMade: the temporary folder is ready, nothing is in the database.
	CreateMade Point = "create-made"
	// CreateRenamed: the folder has its ID, the transaction is not committed.
	CreateRenamed Point = "create-renamed"
	// CreateCommitted: all is done but the caller's answer.
	CreateCommitted Point = "create-committed"
	// CommitSynced: the image root is synced, the transaction not begun.
	CommitSynced Point = "commit-synced"
	// CommitOpen: the transaction holds the new name and is not committed.
	CommitOpen Point = "commit-open"
	// CommitCommitted: all is done but the caller's answer.
	CommitCommitted Point = "commit-committed"
	// UsageMeasured: a committed layer was measured, the figure not stored.
	UsageMeasured Point = "usage-measured"
	// RemoveOpen: the transaction lacks the record and is not committed.
	RemoveOpen Point = "remove-open"
	// RemoveCommitted: the record is gone, the folder is in place.
	RemoveCommitted Point = "remove-committed"
	// RemoveTrashed: the folder is in the trash.
	RemoveTrashed Point = "remove-trashed"
	// SweepMoving: some strays are in the trash, others are not.
	SweepMoving Point = "sweep-moving"
	// TrashDeleting: an entry of the trash is partly deleted.
	TrashDeleting Point = "trash-deleting"
	// BallastReleased: the ballast is given up, the transaction not yet retried.
	BallastReleased Point = "ballast-released"
	// InitMarked: both roots have their marker, there is no database.
	InitMarked Point = "init-marked"
	// InitWritten: the database is written under its temporary name.
	InitWritten Point = "init-written"
)

// Points lists all of them.
func Points() []Point {
	return []Point{
		CreateMarked, CreateMade, CreateRenamed, CreateCommitted,
		CommitSynced, CommitOpen, CommitCommitted,
		UsageMeasured,
		RemoveOpen, RemoveCommitted, RemoveTrashed,
		SweepMoving, TrashDeleting,
		BallastReleased,
		InitMarked, InitWritten,
	}
}
