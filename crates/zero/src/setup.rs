//! From named weights and settings to the plan that all ranks share.

use std::sync::Arc;

use candle_core::Device;
use polarshard_comm::Request;
use polarshard_muon::{Decision, RoutingTable};
use polarshard_partition::{
    Class, Layout, Matrix, Param, Params, Plan, Rank, Span, Terms, Wire, WorldSize, plan_best,
};

use crate::agreement;
use crate::channel::Channel;
use crate::config::Config;
use crate::dtypes;
use crate::error::{Error, Result};
use crate::flat;
use crate::replicas;
use crate::step::control_elems;
use crate::weights::Weight;

/// What is fixed before the first gradient, and agreed upon by all ranks.
#[derive(Debug)]
pub(crate) struct Setup {
    pub(crate) device: Device,
    pub(crate) routing: RoutingTable,
    pub(crate) plan: Arc<Plan>,
    /// With placement, route and policy as planned.
    pub(crate) config: Config,
}

impl Setup {
    /// Lays the weights out, compares the result over ranks, and makes or checks equal weights.
    pub(crate) fn new(
        channel: &mut Channel,
        weights: &[Weight],
        mut config: Config,
    ) -> Result<Self> {
        let device = device_of(weights, &config)?;
        let world = channel.world();
        config.validate(world, &device)?;
        let routing = routing(weights, &config)?;
        let params = parameters(weights, &routing, &config)?;
        if let Some(costs) = config.planned {
            let terms = terms(&params, world, &config, &device);
            let best =
                plan_best(&params, world, config.bucket_size, &terms, &costs)?.swap_remove(0);
            (config.placement, config.route, config.policy) =
                (best.placement, best.route, best.policy);
        }
        let layout = Layout::new(&params, world, config.placement, config.bucket_size)?;
        let plan = Arc::new(Plan::new(&params, layout, config.route, config.policy));
        agreement::agree(channel, &config, weights, &plan, &device)?;
        match config.broadcast_from {
            Some(root) => broadcast(channel, weights, root)?,
            None => replicas::verify(channel, weights)?,
        }
        Ok(Self {
            device,
            routing,
            plan,
            config,
        })
    }
}

/// What a prediction of a step depends on beside its plan.
pub(crate) fn terms(params: &Params, world: WorldSize, config: &Config, device: &Device) -> Terms {
    let results = config.muon.newton_schulz.iterate.on(device);
    Terms {
        stage: config.stage,
        accumulate: config.accumulate,
        gradient_wire: config.gradient_wire.and_then(dtypes::wire),
        result_wire: dtypes::wire(results).unwrap_or(Wire::F32),
        control_elems: control_elems(params, world),
        overlap: config.overlap,
    }
}

/// The one device of all weights.
fn device_of(weights: &[Weight], config: &Config) -> Result<Device> {
    let first = weights
        .first()
        .ok_or(Error::NoParameters)?
        .values()
        .device();
    for weight in weights {
        let (expected, found) = (first.location(), weight.values().device().location());
        if expected != found {
            return Err(Error::MixedDevices {
                name: weight.name.clone(),
                expected,
                found,
            });
        }
    }
    match config.optimizer_device {
        Some(optimizer) if optimizer != first.location() => Err(Error::Offload {
            weights: first.location(),
            optimizer,
        }),
        _ => Ok(first.clone()),
    }
}

fn routing(weights: &[Weight], config: &Config) -> Result<RoutingTable> {
    let shapes: Vec<_> = weights
        .iter()
        .map(|weight| (weight.name.clone(), weight.shape.clone()))
        .collect();
    Ok(config.rules.route(&shapes)?)
}

fn parameters(weights: &[Weight], routing: &RoutingTable, config: &Config) -> Result<Params> {
    let params = weights
        .iter()
        .zip(routing.entries())
        .map(|(weight, routed)| {
            let unsupported = || Error::UnsupportedDtype {
                name: weight.name.clone(),
                dtype: weight.dtype,
            };
            let matrices = match &routed.decision {
                Decision::AdamW => Vec::new(),
                Decision::Muon(shapes) => shapes
                    .iter()
                    .map(|shape| Matrix {
                        span: Span::of_len(shape.offset, shape.rows * shape.cols),
                        rows: shape.rows,
                        cols: shape.cols,
                        cost: config.muon.newton_schulz.flops(shape.rows, shape.cols),
                    })
                    .collect(),
            };
            let wire = dtypes::wire(weight.dtype).ok_or_else(unsupported)?;
            let shape = weight.shape.iter().copied().collect();
            Ok(Param {
                name: weight.name.clone(),
                shape,
                wire,
                matrices,
            })
        })
        .collect::<Result<Vec<_>>>()?;
    Ok(Params::new(params)?)
}

fn broadcast(channel: &mut Channel, weights: &[Weight], root: Rank) -> Result<()> {
    for weight in weights.iter().filter(|weight| weight.elems() > 0) {
        let staging = weight.values().copy()?;
        let values = channel
            .start(Request::broadcast(Class::Weight, &staging, root))?
            .wait()?;
        flat::write(weight.values(), 0, &values)?;
    }
    Ok(())
}
