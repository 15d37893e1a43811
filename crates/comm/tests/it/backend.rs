//! Loopback passes the tests that every backend passes; its sums are what it says they are.

use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};
use polarshard_comm::{
    Communicator, Completion, Error, Loopback, Op, Pause, Pending, Request, conformance, ranks,
};
use polarshard_partition::{Class, Rank, Span, WorldSize};

use crate::{LONG, boxed, floats, run, size, world};

#[test]
fn conforms() {
    conformance::run_all(&boxed, &[1, 2, 3, 4, 8]);
}

#[test]
fn every_case_notices_a_wrong_value() {
    for case in conformance::CASES {
        let world = boxed(size(3)).into_iter();
        let wrong = world.map(|comm| Box::new(Wrong(comm)) as Box<dyn Communicator>);
        let outcomes = ranks::run(wrong.collect(), |comm| (case.run)(comm, &Device::Cpu));
        let name = case.name;
        assert!(!outcomes.iter().all(ranks::Outcome::is_done), "{name}");
    }
}

/// The sum of one element a rank, as rank 1 gets it from each way to a sum.
fn sums(inputs: &[Tensor]) -> Vec<Tensor> {
    let ranks: Vec<_> = world(inputs.len()).into_iter().zip(inputs).collect();
    let outcomes = ranks::run(ranks, |(mut comm, input)| {
        let root = Rank(1);
        let own = comm.rank().0;
        let twice = Tensor::cat(&vec![input; comm.world().get()], 0).unwrap();
        let span = Span::of_len(0, 1);
        let copy = || input.force_contiguous().unwrap();
        let sums = vec![
            run(&mut comm, Request::all_reduce(Class::Gradient, &copy()))?,
            run(
                &mut comm,
                Request::new(Class::Gradient, copy(), vec![Op::Reduce { span, root }]),
            )?,
            run(&mut comm, Request::reduce_scatter(Class::Gradient, &twice))?
                .narrow(0, own, 1)
                .unwrap(),
        ];
        Box::new(comm).shutdown()?;
        Ok::<_, Error>(sums)
    });
    outcomes.into_iter().nth(1).unwrap().unwrap()
}

fn assert_sums(inputs: &[Tensor], want: f64) {
    for sum in sums(inputs) {
        assert_eq!(sum.dtype(), inputs[0].dtype());
        let sum = sum.to_dtype(DType::F64).unwrap();
        assert_eq!(sum.to_vec1::<f64>().unwrap(), [want]);
    }
}

#[test]
fn f32_is_summed_in_rank_order() {
    assert_sums(&[1e8, 1.0, -1e8].map(|x| floats(&[x])), 0.0);
    assert_sums(&[1e8, -1e8, 1.0].map(|x| floats(&[x])), 1.0);
}

#[test]
fn halves_are_rounded_once() {
    // Rounded at every step, 2048 + 1 stays 2048 in f16, and 256 + 1 stays 256 in bf16.
    let f16s = [2048.0, 1.0, 1.0, 1.0].map(f16::from_f32);
    let f16s = f16s.map(|x| Tensor::new(&[x], &Device::Cpu).unwrap());
    assert_sums(&f16s, 2052.0); // 2051 is a tie, which goes to even.
    let bf16s = [256.0, 1.0, 1.0].map(bf16::from_f32);
    let bf16s = bf16s.map(|x| Tensor::new(&[x], &Device::Cpu).unwrap());
    assert_sums(&bf16s, 258.0);
}

#[test]
fn f64_is_summed_in_f64() {
    let tiny = 2f64.powi(-40);
    let inputs = [1.0, tiny, tiny].map(|x| Tensor::new(&[x], &Device::Cpu).unwrap());
    assert_sums(&inputs, 1.0 + 2.0 * tiny);
}

#[test]
fn runs_repeat_bit_for_bit() {
    let attempt = || {
        let outcomes = ranks::run(world(4), |mut comm| {
            let rank = comm.rank().0 as f32;
            let values: Vec<f32> = (0..4096).map(|i| (i as f32 + 0.37 * rank).sin()).collect();
            let pendings: Vec<Pending> = (1..5)
                .map(|k| {
                    let values: Vec<f32> = values.iter().map(|x| x / k as f32).collect();
                    comm.start(Request::all_reduce(Class::Gradient, &floats(&values)))
                })
                .collect::<Result<_, _>>()?;
            let mut bits = Vec::new();
            for pending in pendings {
                let sum = pending.finish(LONG)?.to_vec1::<f32>().unwrap();
                bits.extend(sum.into_iter().map(f32::to_bits));
            }
            Box::new(comm).shutdown()?;
            Ok::<_, Error>(bits)
        });
        outcomes
            .into_iter()
            .map(ranks::Outcome::unwrap)
            .collect::<Vec<_>>()
    };
    let first = attempt();
    assert!(first.iter().all(|bits| *bits == first[0]));
    for _ in 0..10 {
        assert_eq!(attempt(), first);
    }
}

#[test]
fn no_storage_is_locked_while_a_rank_waits() {
    // Both ranks' buffers are views of one tensor, and rank 1 writes it while rank 0 waits.
    let shared = floats(&[1.0, 2.0, 0.0, 0.0]);
    let half = |rank| shared.narrow(0, 2 * rank, 2).unwrap();
    let mut comms = world(2);
    let mut start = |rank: usize| {
        comms[rank]
            .start(Request::all_reduce(Class::Gradient, &half(rank)))
            .unwrap()
    };
    let first = start(0);
    half(1).slice_set(&floats(&[10.0, 20.0]), 0, 0).unwrap();
    assert_eq!(shared.to_vec1::<f32>().unwrap(), [1.0, 2.0, 10.0, 20.0]);
    let second = start(1);
    first.finish(LONG).unwrap();
    second.finish(LONG).unwrap();
    assert_eq!(shared.to_vec1::<f32>().unwrap(), [11.0, 22.0, 11.0, 22.0]);
}

#[test]
fn a_pending_outlives_its_communicator() {
    let mut comms = Loopback::world(size(1), LONG);
    let pending = comms[0]
        .start(Request::all_reduce(Class::Control, &floats(&[3.0])))
        .unwrap();
    let shut_down = comms.pop().map(|comm| Box::new(comm).shutdown());
    assert!(matches!(shut_down, Some(Ok(()))));
    let sum = pending.wait().unwrap();
    assert_eq!(sum.to_vec1::<f32>().unwrap(), [3.0]);
}

/// Adds one to the first element of every result.
#[derive(Debug)]
struct Wrong(Box<dyn Communicator>);

impl Communicator for Wrong {
    fn rank(&self) -> Rank {
        self.0.rank()
    }

    fn world(&self) -> WorldSize {
        self.0.world()
    }

    fn deadline(&self) -> Duration {
        self.0.deadline()
    }

    fn start(&mut self, request: Request) -> Result<Pending, Error> {
        let inner = self.0.start(request)?;
        Ok(Pending::new(inner.buffer().clone(), WrongEnd(inner)))
    }

    fn pause(&self) -> Pause {
        self.0.pause()
    }

    fn shutdown(self: Box<Self>) -> Result<(), Error> {
        self.0.shutdown()
    }
}

#[derive(Debug)]
struct WrongEnd(Pending);

impl Completion for WrongEnd {
    fn is_done(&self) -> bool {
        self.0.is_done()
    }

    fn wait(self: Box<Self>) -> Result<(), Error> {
        self.finish(LONG)
    }

    fn finish(self: Box<Self>, deadline: Duration) -> Result<(), Error> {
        let result = self.0.finish(deadline)?;
        if result.elem_count() > 0 {
            let first = (result.narrow(0, 0, 1).unwrap() + 1.0).unwrap();
            result.slice_set(&first, 0, 0).unwrap();
        }
        Ok(())
    }
}
