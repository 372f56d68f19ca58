package split

func crashMain() {}
