//! NCCL, one process a rank, on as many GPUs as there are; with several ranks on one,
//! `NCCL_MULTI_RANK_GPU_ENABLE=1` must be set.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use polarshard_comm::launch::Launch;
use polarshard_comm::{Communicator, Error, Nccl, Request, SetupError, Shared, conformance, nccl};
use polarshard_partition::{Class, Digest, Rank};

use crate::LONG;
use crate::processes::{Ranks, say};

/// What a rank that failed as it should exits with.
const FAILED: i32 = 3;

/// More than processes that share a GPU take for anything, but an end to what hangs.
const ENOUGH: Duration = Duration::from_secs(60);

/// Of the tests in which somebody is late. It must be enough for the processes to start, too.
const SHORT: Duration = Duration::from_secs(8);

/// What a process does as one rank.
pub(crate) fn play(launch: &Launch, role: &str, argument: &str) {
    let device = nccl::device(launch.local_rank()).or_else(|_| nccl::device(0));
    let device = device.unwrap();
    let connect = |deadline| Nccl::connect(launch, &device, Digest(1), deadline);
    let rank = launch.rank();
    match role {
        "conform" => conform(connect(ENOUGH).unwrap(), &device, argument == "host"),
        "again" => again(&connect, &device),
        "order" => order(connect(ENOUGH).unwrap(), &device),
        "loop" => repeat(connect(ENOUGH).unwrap(), &device),
        "late" => late(connect(SHORT).unwrap(), &device),
        "pause" => pause(connect(SHORT).unwrap(), &device),
        "mismatch" => mismatch(connect(SHORT).unwrap(), &device, argument),
        "digest" => {
            let digest = Digest(u64::from(rank == Rank(1)));
            say(Nccl::connect(launch, &device, digest, ENOUGH).unwrap_err());
        }
        "device" => {
            let device = match rank {
                Rank(1) => Device::new_cuda(0).unwrap(),
                _ => device,
            };
            say(Nccl::connect(launch, &device, Digest(1), ENOUGH).unwrap_err());
        }
        role => panic!("no role {role}"),
    }
}

fn ones(len: usize, device: &Device) -> Tensor {
    Tensor::ones(len, DType::F32, device).unwrap()
}

fn all_reduce(comm: &mut Nccl, len: usize, device: &Device) -> Result<Tensor, Error> {
    let request = Request::all_reduce(Class::Gradient, &ones(len, device));
    comm.start(request)?.finish(LONG)
}

/// All cases on one communicator: to set one up takes a second.
fn conform(comm: Nccl, device: &Device, on_host: bool) {
    let shared = Shared::new(comm);
    let host = Device::Cpu;
    let device = if on_host { &host } else { device };
    for case in conformance::CASES {
        let begun = Instant::now();
        (case.run)(Box::new(shared.clone()), device).unwrap_or_else(|e| {
            panic!("{} on rank {}: {e}", case.name, shared.rank());
        });
        say(format_args!("{}: well ({:?})", case.name, begun.elapsed()));
    }
    Box::new(shared.into_inner().unwrap()).shutdown().unwrap();
}

/// One world after the other, in the same processes.
fn again(connect: &dyn Fn(Duration) -> Result<Nccl, SetupError>, device: &Device) {
    for _ in 0..3 {
        let mut comm = connect(ENOUGH).unwrap();
        let sum = all_reduce(&mut comm, 3, device).unwrap();
        let world = comm.world().get() as f32;
        assert_eq!(sum.to_vec1::<f32>().unwrap(), [world; 3]);
        Box::new(comm).shutdown().unwrap();
    }
    say("well");
}

/// Long work before and after each request, all of it queued without a look at the results: without
/// the streams waiting for each other the values would be of other moments.
fn order(mut comm: Nccl, device: &Device) {
    const LEN: usize = 1 << 24;
    const STEPS: usize = 12;
    let world = comm.world().get() as f64;
    let mut x = ones(LEN, device);
    let mut want = 1.0;
    let mut results = Vec::new();
    for step in 0..STEPS {
        for _ in 0..8 {
            x = (x + 1.0).unwrap();
        }
        let request = Request::all_reduce(Class::Gradient, &x);
        let sum = comm.start(request).unwrap().wait().unwrap();
        x = (sum / world).unwrap();
        want += 8.0;
        results.push((step, want, x.copy().unwrap()));
    }
    for (step, want, x) in results {
        let low = x.min(0).unwrap().to_scalar::<f32>().unwrap();
        let high = x.max(0).unwrap().to_scalar::<f32>().unwrap();
        assert_eq!((low, high), (want as f32, want as f32), "step {step}");
    }
    Box::new(comm).shutdown().unwrap();
    say("well");
}

/// Until something goes wrong.
fn repeat(mut comm: Nccl, device: &Device) {
    for i in 0.. {
        match all_reduce(&mut comm, 1 << 22, device) {
            Ok(_) if i == 3 => say("going"),
            Ok(_) => {}
            Err(error) => {
                say(error.first());
                drop(comm);
                std::process::exit(FAILED);
            }
        }
    }
}

fn spin(time: Duration) {
    let begun = Instant::now();
    while begun.elapsed() < time {
        thread::yield_now();
    }
}

/// Rank 2 comes when it is over.
fn late(mut comm: Nccl, device: &Device) {
    all_reduce(&mut comm, 8, device).unwrap();
    if comm.rank() == Rank(2) {
        spin(SHORT + SHORT / 2);
    }
    let error = all_reduce(&mut comm, 8, device).unwrap_err();
    say(error.first());
    assert!(all_reduce(&mut comm, 8, device).unwrap_err().is_fatal());
}

/// Rank 1 is late, and says so before.
fn pause(mut comm: Nccl, device: &Device) {
    all_reduce(&mut comm, 8, device).unwrap();
    if comm.rank() == Rank(1) {
        let pause = comm.pause();
        spin(SHORT + SHORT / 4);
        drop(pause);
    }
    all_reduce(&mut comm, 8, device).unwrap();
    Box::new(comm).shutdown().unwrap();
    say("well");
}

/// Rank 2 does something else than the others.
fn mismatch(mut comm: Nccl, device: &Device, what: &str) {
    all_reduce(&mut comm, 8, device).unwrap();
    let is_wrong = comm.rank() == Rank(2);
    let error = match what {
        "shutdown" if is_wrong => Box::new(comm).shutdown().unwrap_err(),
        "leave" if is_wrong => return,
        "length" if is_wrong => all_reduce(&mut comm, 1 << 10, device)
            .and_then(|_| Box::new(comm).shutdown().map(|()| panic!("all well")))
            .unwrap_err(),
        _ => all_reduce(&mut comm, 1 << 22, device).unwrap_err(),
    };
    say(error.first());
}

/// One test at a time: they share the GPU.
fn alone() -> MutexGuard<'static, ()> {
    static GPU: Mutex<()> = Mutex::new(());
    GPU.lock().unwrap_or_else(PoisonError::into_inner)
}

/// All ranks do their part, and say so.
fn assert_well(world: usize, role: &str) {
    let _alone = alone();
    let begun = Instant::now();
    let (said, exits) = Ranks::spawn(world, role).wait(Duration::from_secs(5));
    assert_eq!(exits.code(), 0, "{role} on {world} ranks: {said:?}");
    for lines in &said {
        assert!(
            lines.last().is_some_and(|line| line.contains("well")),
            "{said:?}"
        );
    }
    println!("{role} on {world} ranks: {:?}", begun.elapsed());
    said[0].iter().for_each(|line| println!("  {line}"));
}

/// What each rank says of a failure.
fn failures(world: usize, role: &str) -> Vec<String> {
    let _alone = alone();
    let (said, exits) = Ranks::spawn(world, role).wait(LONG);
    assert_eq!(exits.code(), 0, "{said:?}");
    said.iter().map(|lines| lines.concat()).collect()
}

#[test]
#[ignore = "needs a GPU"]
fn conforms_on_1_rank() {
    assert_well(1, "conform:device");
}

#[test]
#[ignore = "needs a GPU"]
fn conforms_on_2_ranks() {
    assert_well(2, "conform:device");
}

#[test]
#[ignore = "needs a GPU"]
fn conforms_on_4_ranks() {
    assert_well(4, "conform:device");
}

#[test]
#[ignore = "needs a GPU"]
fn conforms_on_8_ranks() {
    assert_well(8, "conform:device");
}

#[test]
#[ignore = "needs a GPU"]
fn conforms_with_buffers_of_the_host() {
    assert_well(2, "conform:host");
}

#[test]
#[ignore = "needs a GPU"]
fn worlds_follow_each_other() {
    assert_well(2, "again:");
}

#[test]
#[ignore = "needs a GPU"]
fn work_before_and_after_waits() {
    assert_well(2, "order:");
}

#[test]
#[ignore = "needs a GPU"]
fn a_pause_stops_the_deadline() {
    assert_well(2, "pause:");
}

#[test]
#[ignore = "needs a GPU"]
fn a_rank_that_does_not_come_is_named() {
    for text in failures(3, "late:") {
        assert!(
            text.contains("call 1, gradient all-reduce of 8 f32"),
            "{text}"
        );
        assert!(
            text.ends_with("not done within 8s, missing rank 2"),
            "{text}"
        );
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_rank_that_does_something_else_is_named() {
    for (what, called) in [
        ("shutdown", "rank 2, call 1, shutdown"),
        ("length", "rank 2, call 1, gradient all-reduce of 1024 f32"),
    ] {
        for text in failures(3, &format!("mismatch:{what}")) {
            assert!(text.contains(", does not match "), "{text}");
            assert!(text.contains(called), "{text}");
            assert!(
                text.contains("call 1, gradient all-reduce of 4194304 f32"),
                "{text}"
            );
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_rank_that_leaves_is_named() {
    for (rank, text) in failures(3, "mismatch:leave").into_iter().enumerate() {
        assert_eq!(text.is_empty(), rank == 2, "{text}");
        assert!(
            rank == 2 || text.ends_with("rank 2 returned early"),
            "{text}"
        );
    }
}

#[test]
#[ignore = "needs a GPU"]
fn ranks_that_differ_do_not_begin() {
    for text in failures(2, "digest:") {
        assert!(
            text.starts_with("two ranks are configured differently: "),
            "{text}"
        );
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_device_on_a_default_stream_is_refused() {
    let texts = failures(2, "device:");
    assert!(
        texts[1].contains("make it with `nccl::device`"),
        "{}",
        texts[1]
    );
    assert!(
        texts[0].starts_with("rank 1 returned early: the device works"),
        "{}",
        texts[0]
    );
}

/// Twenty worlds of four, four at a time; in each, one process is killed among collectives.
#[test]
#[ignore = "needs a GPU"]
fn a_process_that_is_killed_is_named_and_the_others_end() {
    let _alone = alone();
    let kill = |i: u32| {
        let mut ranks = Ranks::spawn(4, "loop:");
        let going = ranks.hear();
        assert!(going.iter().all(Option::is_some), "{going:?}");
        spin(Duration::from_millis(u64::from(37 * i % 101)));
        let victim = (i % 4) as usize;
        ranks.kill(victim);
        let killed = Instant::now();
        let (said, exits) = ranks.wait(ENOUGH);
        let took = killed.elapsed();
        assert!(took < ENOUGH, "{took:?}");
        for (rank, lines) in said.iter().enumerate().filter(|(rank, _)| *rank != victim) {
            assert_eq!(exits.statuses[rank].code(), Some(FAILED), "{said:?}");
            let is_named = lines.concat().ends_with(&format!("rank {victim} was lost"));
            assert!(is_named, "rank {rank} after the end of {victim}: {lines:?}");
        }
        println!("world {i}, rank {victim} killed: the others ended after {took:?}");
    };
    for batch in 0..5 {
        thread::scope(|scope| {
            (0..4).for_each(|i| drop(scope.spawn(move || kill(4 * batch + i))));
        });
    }
}
