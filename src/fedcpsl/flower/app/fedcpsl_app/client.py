"""The device's side."""

from flwr.clientapp import ClientApp

from fedcpsl.flower import client

app = ClientApp()
app.train()(client.handle_message)
app.query()(client.device_name)
