//! The crate from outside.

mod backend;
