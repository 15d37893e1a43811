//! Loopback passes the tests that every backend passes, and repeats bit for bit.

use std::time::Duration;

use polarshard_comm::{Communicator, Loopback, conformance};
use polarshard_partition::WorldSize;

const DEADLINE: Duration = Duration::from_secs(30);

fn boxed(world: WorldSize) -> Vec<Box<dyn Communicator>> {
    let ranks = Loopback::world(world, DEADLINE).into_iter();
    ranks
        .map(|rank| Box::new(rank) as Box<dyn Communicator>)
        .collect()
}

#[test]
fn conforms() {
    conformance::run_all(&boxed, &[1, 2, 3, 4, 8]);
}
