"""Which requests are on a decode worker: stores with one owner for each fact, that decide nothing."""
