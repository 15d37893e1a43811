//! polarshard.
