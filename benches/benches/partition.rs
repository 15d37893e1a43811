//! Layouts and plans at scale.
fn main() {}
