//! Starts workers somewhere and looks after them: as processes of this machine for now.

pub mod local;
