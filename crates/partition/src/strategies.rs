//! Strategies of proptest: models that shrink to small ones, and everything a plan is made of.
