package quota

import (
	"errors"
	"os"
)

// SetProject gives one file or folder a project, as somebody else than an Assigner would.
func SetProject(path string, id uint32, inherit bool) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(setProject(file, id, inherit), file.Close())
}

// ProjectOf reads what SetProject sets.
func ProjectOf(path string) (id uint32, inherits bool, err error) {
	file, err := os.Open(path)
	if err != nil {
		return 0, false, err
	}
	a, err := projectOf(file)
	return a.project, a.flags&projectInherit != 0, errors.Join(err, file.Close())
}

// WriteRecord writes the record of an Assigner that has got so far with a folder.
func WriteRecord(path string, id uint32, done bool) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	node, err := inodeOf(dir.Fd())
	if err == nil {
		err = record{id: id, inode: node.number, born: node.born, done: done}.write(dir)
	}
	return errors.Join(err, dir.Close())
}

// Pure parts.
var (
	ParseProjects = parseProjects
	LimitUnits    = limitUnits
)

// RecordAttribute is the name of the record.
const RecordAttribute = recordAttribute
