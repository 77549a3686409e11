//! The commands, one file each.

pub(crate) mod data;
pub(crate) mod demo;
pub(crate) mod hive;
pub(crate) mod key;
pub(crate) mod logs;
pub(crate) mod model;
pub(crate) mod run;
pub(crate) mod serve;
pub(crate) mod status;
pub(crate) mod train;
pub(crate) mod watch;
pub(crate) mod worker;
