//! Properties of layouts and plans, against oracles that go element by element.
#![expect(clippy::unwrap_used, reason = "helpers of tests may panic as tests do")]

mod balance;
mod digest;
mod exchange;
mod flat;
mod layout;
mod models;
mod oracle;
mod planner;
mod predict;
mod routes;
mod whole;
