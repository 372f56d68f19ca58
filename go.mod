module github.com/cleave-cri/cleave

go 1.26
